"""Train a byte-level GPT with FSDP2 on Python's own sources; with keepstep it survives faults."""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import math
import os
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import keepstep

# On a GPU equal runs need cuBLAS to keep its workspaces; read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@dataclass(frozen=True)
class Preset:
    """Size of the model, of a micro-batch on one rank, and of the text."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    learning_rate: float
    text_bytes: int


PRESETS = {
    "tiny": Preset(3, 96, 4, 64, 4, 3e-3, 4_000_000),
    "small": Preset(6, 384, 6, 256, 16, 1e-3, 16_000_000),
    "100m": Preset(14, 768, 12, 1024, 16, 6e-4, 16_000_000),
}


class Block(nn.Module):
    """Causal self-attention and a two-layer MLP, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(-2)))
        added: Tensor = self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))
        return x + added


class GPT(nn.Module):
    """The mean loss of predicting ``targets`` from ``tokens``, bytes, both (batch, length)."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, preset.width)
        self.positions = nn.Embedding(preset.context, preset.width)
        self.blocks = nn.ModuleList(Block(preset.width, preset.heads) for _ in range(preset.layers))
        self.norm, self.head = nn.LayerNorm(preset.width), nn.Linear(preset.width, 256)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Windows:
    """Random windows of a text; which ones depends only on ``name`` and ``position``."""

    def __init__(self, text: bytearray, preset: Preset, device: torch.device, name: str) -> None:
        self.text = torch.frombuffer(text, dtype=torch.uint8)
        self.preset, self.device, self.name = preset, device, name
        self.position = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """The next batch: inputs and targets, both (batch, context)."""
        chance, length = random.Random(f"{self.name}/{self.position}"), self.preset.context + 1
        starts = [chance.randrange(len(self.text) - length) for _ in range(self.preset.batch)]
        batch = torch.stack([self.text[start : start + length] for start in starts])
        batch = batch.to(self.device, torch.long)
        self.position += 1
        return batch[:, :-1], batch[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def read_text(limit_bytes: int) -> tuple[bytearray, bytearray]:
    """The standard library's sources in order of name; each tenth file is for validation."""
    library, others = Path(sysconfig.get_path("stdlib")), ("site-packages", "dist-packages")
    paths = sorted([*library.glob("*.py"), *library.glob("*/*.py")])
    training, validation = bytearray(), bytearray()
    for index, path in enumerate(path for path in paths if path.parent.name not in others):
        (validation if index % 10 == 9 else training).extend(path.read_bytes())
        if len(training) + len(validation) >= limit_bytes:
            break
    return training, validation


@torch.no_grad()
def evaluate(model: nn.Module, data: Windows, batches: int = 4) -> float:
    """Mean loss over the same ``batches`` of validation text a rank at each call."""
    model.eval()
    data.position = 0
    mean = torch.stack([model(*data.next()) for _ in range(batches)]).mean()
    model.train()
    dist.all_reduce(mean)
    return float(mean / dist.get_world_size())


def weights_digest(optimizer: torch.optim.Optimizer, device: torch.device) -> str:
    """On rank 0 one hash over all ranks' parameters and optimizer state, in order of rank."""
    digest = hashlib.sha256()
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state[parameter]
        for value in (parameter, *(state[key] for key in sorted(state))):
            local = value.to_local() if isinstance(value, DTensor) else value
            local = local.detach().cpu().contiguous()
            digest.update(ctypes.string_at(local.data_ptr(), local.nbytes))
    digests = torch.tensor([list(digest.digest())] * dist.get_world_size(), device=device)
    # Sent, not gathered: gloo's threads may keep a gathered tensor until Python is half gone, and
    # then abort the process.
    for rank in range(1, dist.get_world_size()):
        if dist.get_rank() == rank:
            dist.send(digests[rank], 0)
        elif dist.get_rank() == 0:
            dist.recv(digests[rank], rank)
    return hashlib.sha256(bytes(digests.flatten().tolist())).hexdigest()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def parse_arguments() -> argparse.Namespace:
    def count(text: str) -> int:
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text} is less than 1")
        return int(text)

    parser = argparse.ArgumentParser(description="Train a byte-level GPT on Python's own sources.")
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--steps", type=count, default=60)
    parser.add_argument("--eval-every", type=count, default=100, help="also at the first and last")
    parser.add_argument("--accumulate", type=count, default=2, help="micro-batches in a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every-steps", type=count, help="save a checkpoint each so many steps")
    return parser.parse_args()


def main(job: keepstep.Job) -> None:
    args = parse_arguments()
    preset = PRESETS[args.preset]
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)  # the same first weights on every rank
    with device:
        model = GPT(preset)
    say(f"{args.preset}: {sum(p.numel() for p in model.parameters()):,} parameters, {world} ranks")
    mesh = init_device_mesh(device.type, (world,))
    half = torch.bfloat16 if device.type == "cuda" else None
    precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    sharded = fully_shard(model, mesh=mesh, mp_policy=precision)

    def rate(step: int) -> float:  # linear warm-up, then a cosine down to a tenth
        warm_up: int = max(1, args.steps // 10)
        progress: float = min(1.0, max(0, step - warm_up) / max(1, args.steps - warm_up))
        return min(1.0, (step + 1) / warm_up) * (0.55 + 0.45 * math.cos(math.pi * progress))

    optimizer = torch.optim.AdamW(model.parameters(), lr=preset.learning_rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    training, validation = read_text(preset.text_bytes)
    data = Windows(training, preset, device, f"{args.seed}/{rank}")
    held_out = Windows(validation, preset, device, f"validation/{rank}")
    torch.manual_seed(args.seed * world + rank + 1)  # other dropout on every rank

    job.track(model=model, optimizer=optimizer, scheduler=scheduler, data=data)
    for step in job.steps(args.steps):
        loss = torch.zeros((), device=device)
        for micro in range(1, args.accumulate + 1):
            sharded.set_requires_gradient_sync(micro == args.accumulate)
            micro_loss = model(*data.next()) / args.accumulate
            micro_loss.backward()
            loss += micro_loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        job.log(loss=loss.item())
        if step in (1, args.steps) or step % args.eval_every == 0:
            with job.section("eval"):
                mean = evaluate(model, held_out)
            say(f"step {step}: validation loss {mean:.3f}")

    say(f"weights digest: {weights_digest(optimizer, device)}")


if __name__ == "__main__":
    every = parse_arguments().every_steps
    keepstep.run(main, settings={"checkpoint.every_steps": every} if every else {})
