"""The Wrapper cannot call a function whose annotations are strings.

    python string_annotation.py

``from __future__ import annotations``, the first line of this file, makes all annotations of a
module strings. NVRx hands each to ``issubclass``.
"""

from __future__ import annotations

import sys

from ranks import Ranks, verdict, wrapper


def train(steps: int) -> int:
    return steps


def rank() -> None:
    try:
        print(f"returned {wrapper()(train)(3)}", flush=True)
    except TypeError as error:
        print(f"ended with TypeError: {error}", flush=True)


def main() -> None:
    with Ranks(__file__, 1, "rank") as ranks:
        said = ranks.line(0)
    verdict(said.startswith("ended"), f"the call {said}")


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
