"""``keepstep.Checkpointer``: the public name of ``keepstep.rank.checkpointer.Checkpointer``."""

from __future__ import annotations

from keepstep.rank.checkpointer import Checkpointer

__all__ = ["Checkpointer"]
