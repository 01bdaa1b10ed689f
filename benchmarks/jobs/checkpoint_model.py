"""The model, its step, and its state as bytes, for the benchmark of checkpoints. Runs in ranks."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

LAYERS = 24
HEADS = 4
WORDS = 256
SEED = 0


def width_for(state_mb: float) -> int:
    """Width at which parameters and AdamW's two moments are about ``state_mb`` megabytes."""
    width = math.sqrt(state_mb * 1e6 / (LAYERS * 12 * 3 * 4))
    return max(16, round(width / 16) * 16)


class Block(nn.Module):
    """Causal self-attention and a two-layer MLP, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        added: Tensor = self.down(F.gelu(self.up(self.norm_2(x))))
        return x + added


class Model(nn.Module):
    """The mean loss of predicting the next of some tokens, shape (1, length)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@dataclass
class Training:
    """A model and its optimizer on one rank; FSDP2 where there are several."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    tokens: Tensor

    @classmethod
    def make(cls, state_mb: float, length: int) -> Training:
        """A new one, on which no step was made: the optimizer has no state yet."""
        torch.manual_seed(SEED)
        model = Model(width_for(state_mb))
        world = dist.get_world_size()
        if world > 1:
            mesh = init_device_mesh("cpu", (world,))
            # Gathered once a step: through loopback a second time would be most of the step.
            for block in model.blocks:
                fully_shard(block, mesh=mesh, reshard_after_forward=False)
            fully_shard(model, mesh=mesh, reshard_after_forward=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        torch.manual_seed(SEED + 1 + dist.get_rank())
        return cls(model, optimizer, torch.randint(WORDS, (1, length)))

    def compute(self) -> None:
        """Forward and backward."""
        self.model(self.tokens).backward()

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank has of all that a checkpoint must hold, by name."""
        for name, parameter in self.model.named_parameters():
            yield name, local(parameter)
            for kind, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                yield f"{name}.{kind}", local(value)

    def digests(self) -> dict[str, str]:
        """A hash of each tensor's bytes."""
        return {name: digest(tensor) for name, tensor in self.tensors()}


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without autograd."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def digest(tensor: Tensor) -> str:
    """xxh3 of the bytes of a tensor in host memory."""
    whole = tensor.contiguous()
    size = whole.numel() * whole.element_size()
    data = (ctypes.c_char * size).from_address(whole.data_ptr()) if size else b""
    return xxhash.xxh3_128_hexdigest(data)
