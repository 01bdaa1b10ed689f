"""Fakes that keepstep ships, for its own tests and for those of code that builds on it."""

from __future__ import annotations

from keepstep.testing.clock import FakeClock
from keepstep.testing.lines import LineSink

__all__ = ["FakeClock", "LineSink"]
