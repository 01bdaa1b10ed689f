"""An exception that cannot be copied ends the rank, though the Wrapper was to restart it.

    python exception_copy.py

The Wrapper shows its hooks a copy of its state, made with ``dataclasses.asdict``, which copies the
script's exception with ``copy.deepcopy``. Many cannot be: here one with a second argument.
"""

from __future__ import annotations

import sys

from ranks import Ranks, verdict, wrapper


class ShapeError(Exception):
    """An exception as people write them."""

    def __init__(self, wanted: int, found: int) -> None:
        super().__init__(f"wanted {wanted}, found {found}")


def rank() -> None:
    from nvidia_resiliency_ext import inprocess

    attempts = []

    def train() -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise ShapeError(1, 2)

    class Healthy(inprocess.health_check.HealthCheck):
        def __call__(self, state):
            return state

    try:
        wrapper(health_check=Healthy())(train)()
    except Exception as error:
        print(f"ended with {type(error).__name__}: {error.__cause__ or error}", flush=True)
    else:
        print(f"returned after {len(attempts)} attempts", flush=True)


def main() -> None:
    with Ranks(__file__, 1, "rank") as ranks:
        said = ranks.line(0)
    verdict(said.startswith("ended"), f"the rank {said}")


if __name__ == "__main__":
    rank() if sys.argv[1:] == ["rank"] else main()
