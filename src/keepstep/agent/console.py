"""What a person sees while a run goes on: ranks' output, keepstep's lines, and a progress line.

Ranks' output keeps its stream; everything of keepstep goes to stderr. On a terminal the progress
line stays at the bottom and is rewritten; elsewhere a plain line is printed now and then.
"""

from __future__ import annotations

import math
import sys
from typing import TextIO

from rich.console import Console as RichConsole
from rich.console import RenderableType

from keepstep.wire.messages import Notice

_PLAIN_EVERY_S = 10.0
_LIVE_EVERY_S = 0.2


class Console:
    """Writes to the agent's stdout and stderr."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._live = self._err.isatty()
        self._shown = ""
        self._last = 0.0
        self.committed = 0
        self.restarts = 0

    def show(self, stream: int, text: str) -> None:
        """A line of a rank."""
        self._clear()
        file = self._out if stream == 1 else self._err
        file.write(text + "\n")
        file.flush()

    def say(self, text: str) -> None:
        """A line of keepstep."""
        self._clear()
        self._err.write(f"keepstep: {text}\n")
        self._err.flush()

    def notice(self, notice: Notice) -> None:
        """What was decided about the run: a line, and what the progress line shows from now on."""
        if notice.kind == "commit":
            self.committed = max(self.committed, notice.step)
            return
        if notice.kind == "restart":
            self.restarts += 1
        if notice.kind == "go":
            self.committed = notice.step
        self.say(notice.text)

    def progress(self, step: int, step_s: float, loss: float, now: float) -> None:
        """Show how far the run is; cheap to call often."""
        if step <= 0 or now - self._last < (_LIVE_EVERY_S if self._live else _PLAIN_EVERY_S):
            return
        self._last = now
        parts = [f"step {step}"]
        if not math.isnan(loss):
            parts.append(f"loss {loss:.4f}")
        parts.append(f"{step_s:.3f} s/step")
        parts.append(f"checkpoint {self.committed}" if self.committed else "no checkpoint yet")
        parts.append(f"restarts {self.restarts}")
        text = " | ".join(parts)
        if not self._live:
            self.say(text)
        elif text != self._shown:
            self._err.write(f"\r\x1b[K{text}")
            self._err.flush()
            self._shown = text

    def _clear(self) -> None:
        if self._live and self._shown:
            self._err.write("\r\x1b[K")
            self._shown = ""

    def tables(self, content: RenderableType) -> None:
        """The tables at the end of a run."""
        self._clear()
        RichConsole(file=self._err).print(content)

    def close(self) -> None:
        """Remove the progress line."""
        self._clear()
        self._err.flush()
