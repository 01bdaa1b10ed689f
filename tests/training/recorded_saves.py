"""FSDP2 under torchrun with a Checkpointer and nothing else of keepstep; records every collective.

Argument: the folder of the checkpoints. Each rank prints one JSON object: by phase (``train``,
``save``, ``restore``) the operations, each with the bytes of its largest tensor.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from keepstep import Checkpointer

# What may go over a group without being an operation that the dispatcher sees (other threads).
_METHODS = (
    "allgather allgather_coalesced _allgather_base allreduce allreduce_coalesced alltoall "
    "alltoall_base barrier broadcast gather monitored_barrier recv recv_anysource reduce "
    "reduce_scatter _reduce_scatter_base scatter send"
)


def _bytes(values: Any) -> int:
    sizes = [v.numel() * v.element_size() for v in tree_leaves(values) if torch.is_tensor(v)]
    return max(sizes, default=0)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each collective, whoever starts it and in whatever thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = ""
        self.seen: dict[str, list[tuple[str, int]]] = {}
        for name in _METHODS.split():
            original = getattr(dist.ProcessGroup, name, None)
            if original is not None:
                setattr(dist.ProcessGroup, name, self._method(name, original))

    def _note(self, name: str, values: Any) -> None:
        self.seen.setdefault(self.phase, []).append((name, _bytes(values)))

    def _method(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(group: dist.ProcessGroup, *values: Any, **named: Any) -> Any:
            self._note(f"ProcessGroup.{name}", [values, named])
            return original(group, *values, **named)

        return method

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self._note(str(func), [args, kwargs])
        return func(*args, **(kwargs or {}))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer, "progress": {"seen": 0}}
    with Checkpointer(sys.argv[1], when_busy="wait") as checkpointer, Recorder() as recorder:
        for step in range(1, 6):
            recorder.phase = "train"
            model(torch.randn(4, 64)).square().mean().backward()
            recorder.phase = "save"
            if step > 1:
                checkpointer.mutates()
            recorder.phase = "train"
            optimizer.step()
            optimizer.zero_grad()
            recorder.phase = "save"
            checkpointer.prepare(state)
            save = checkpointer.async_save(state, step)
            assert not save.skipped
            checkpointer.poll()
        checkpointer.finalize()
        assert checkpointer.latest() == 5
        recorder.phase = "restore"
        assert checkpointer.restore(state) == 5
        recorder.phase = "close"
    print("recorded", json.dumps(recorder.seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
