"""A place for event lines that keeps them in memory. Runs in tests."""

from __future__ import annotations

import msgspec

from keepstep.events import Event


class LineSink:
    """Sink of a ``Recorder``: call it with a line, read ``lines`` or ``events`` afterwards."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        """Every line as it was given."""

    def __call__(self, line: bytes) -> None:
        self.lines.append(line)

    @property
    def events(self) -> list[Event]:
        """The lines, decoded.

        Raises:
            msgspec.DecodeError: a line is no event.
        """
        return [msgspec.json.decode(line, type=Event) for line in self.lines]

    @property
    def kinds(self) -> list[str]:
        """Kinds of the events, in order."""
        return [event.kind for event in self.events]
