"""0.5 and newer: without a GPU, in-process restart never restarts.

    python no_gpu_restart.py

From 0.5 on the Wrapper adds a check of the GPU to the checks after a fault, and a machine without
one fails it. 0.4.1 has no such check.
"""

from __future__ import annotations

import sys

from ranks import Ranks, verdict, wrapper


def rank() -> None:
    attempts = []

    def train() -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise ValueError("one fault")

    try:
        wrapper(gpu_check=True)(train)()
    except Exception as error:
        print(f"ended with {type(error).__name__}", flush=True)
    else:
        print(f"returned after {len(attempts)} attempts", flush=True)


def main() -> None:
    with Ranks(__file__, 1, "rank") as ranks:
        said = ranks.line(0)
    verdict(said.startswith("ended"), f"the rank {said}")


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
