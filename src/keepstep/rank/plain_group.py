"""The process group of a script started by ``python`` or ``torchrun``. Runs in the rank."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType

from keepstep.wire.types import World


class PlainGroup:
    """Context manager: the default group from the environment (RANK, WORLD_SIZE, ...), as torchrun
    sets it; a script started alone gets a group of one.

    Args:
        environ: The environment. backend: empty for gloo, or NCCL too with a GPU.
        timeout_s: Limit of a collective in seconds.
    """

    def __init__(self, environ: Mapping[str, str], backend: str, timeout_s: float) -> None:
        self._environ = environ
        self._backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        self._made = False

    def __enter__(self) -> World:
        number = {
            name: int(self._environ.get(name, default))
            for name, default in (
                ("RANK", "0"),
                ("WORLD_SIZE", "1"),
                ("LOCAL_RANK", "0"),
                ("LOCAL_WORLD_SIZE", "1"),
                ("GROUP_RANK", "0"),
            )
        }
        if importlib.util.find_spec("torch") is not None:
            self._init(number["RANK"], number["WORLD_SIZE"])
        return World(
            rank=number["RANK"],
            size=number["WORLD_SIZE"],
            local_rank=number["LOCAL_RANK"],
            local_size=number["LOCAL_WORLD_SIZE"],
            node=number["GROUP_RANK"],
            round=1,
        )

    def _init(self, rank: int, size: int) -> None:
        import torch
        import torch.distributed as dist

        if dist.is_initialized():
            return
        backend = self._backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        if size == 1 and "MASTER_ADDR" not in self._environ:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(
                backend, store=store, rank=0, world_size=1, timeout=self._timeout
            )
        else:
            dist.init_process_group(backend, rank=rank, world_size=size, timeout=self._timeout)
        self._made = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._made:
            import torch.distributed as dist

            dist.destroy_process_group()
