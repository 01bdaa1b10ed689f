"""keepstep: fault-tolerant PyTorch FSDP training.

Importing it does not import torch. The public names:

- ``run(main)``, ``Job``, ``World``: a training function under keepstep.
- ``restartable``, ``heartbeat``, ``Checkpointer``: each mechanism alone; ``RngState`` for what the
  random generators are in a checkpoint of one's own.
- ``KeepstepError`` and its tree: see ``keepstep.errors``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepstep.api.checkpointer import Checkpointer
    from keepstep.api.job import Job
    from keepstep.api.run import heartbeat, restartable, run
    from keepstep.checkpoint.torch_rng import RngState
    from keepstep.errors import KeepstepError
    from keepstep.wire.types import World

__version__ = "0.1.0"
_WHERE = {
    "Checkpointer": "keepstep.api.checkpointer",
    "Job": "keepstep.api.job",
    "KeepstepError": "keepstep.errors",
    "RngState": "keepstep.checkpoint.torch_rng",
    "World": "keepstep.wire.types",
    "heartbeat": "keepstep.api.run",
    "restartable": "keepstep.api.run",
    "run": "keepstep.api.run",
}
__all__ = [
    "Checkpointer",
    "Job",
    "KeepstepError",
    "RngState",
    "World",
    "heartbeat",
    "restartable",
    "run",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'keepstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
