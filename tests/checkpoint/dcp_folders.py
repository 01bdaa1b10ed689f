"""torch's distributed checkpoints in one process, without its warning about that."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save


def dcp_save(state: dict[str, Any], folder: Path) -> Path:
    """Write ``state``; returns the folder."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        torch_save(state, checkpoint_id=folder, no_dist=True)
    return folder


def dcp_load(state: dict[str, Any], folder: Path) -> None:
    """Fill ``state``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        torch_load(state, checkpoint_id=folder, no_dist=True)
