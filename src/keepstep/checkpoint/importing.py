"""Makes a committed checkpoint of our own form out of any source. Used by the command line.

Needs no torch. The data is read once and written once, in one file, with checksums from then on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from keepstep.checkpoint import (
    blocks,
    catalog,
    layout,
    manifest,
    shard_file,
    tensor_bytes,
)
from keepstep.checkpoint.commit import commit
from keepstep.checkpoint.shard_file import ShardPlan, TensorSpec
from keepstep.checkpoint.source import IMPORTED, Source, StoredChunk, StoredTensor
from keepstep.checkpoint.tensor_bytes import TensorBytes
from keepstep.checkpoint.writer import claim_folder
from keepstep.clock import SYSTEM, Clock
from keepstep.errors import CheckpointMismatch, UsageError
from keepstep.wire.types import Version

_Part = tuple[StoredTensor, StoredChunk | None]


def import_source(
    source: Source,
    root: Path,
    run: str,
    step: int,
    *,
    progress: Callable[[int], None] = lambda count: None,
    clock: Clock = SYSTEM,
) -> str:
    """Write everything in ``source`` as a checkpoint of ``step``; returns its folder's name.

    Args:
        source: What is imported.
        root: Folder of the checkpoints; made if missing.
        run: Id of the run that will go on from it.
        step: Completed steps.
        progress: Told how many more bytes were written.
        clock: Where the creation time comes from.

    Raises:
        UsageError: the folder has checkpoints already.
        CheckpointError: the source cannot be read, or something in it cannot be kept.
        OSError: storage failed.
    """
    there = catalog.published(root)
    if there:
        raise UsageError(
            f"{root} has {len(there)} checkpoints already, for example {there[-1]}",
            done="nothing was imported",
            advice="import into the folder of a run that has none, and start it from there",
        )
    values, stored = source.values(0), source.tensors(0)
    if not stored:
        raise CheckpointMismatch(
            "there is no tensor in it that could be imported",
            where=source.about.where,
            done="nothing was imported",
        )
    version = Version(run=run, term=0, round=0, step=step, world=1)
    parts = _parts(stored)
    specs = [_spec(name, of, part) for name, (of, part) in parts.items()]
    plan = ShardPlan(specs, version, 0, {**values, IMPORTED: {"from": source.about.where}})
    folder = claim_folder(root, version)
    final = root / folder / layout.shard_name(0)
    temporary = final.with_name(layout.temporary_name(final.name))
    try:
        with tensor_bytes.opened(source) as reader:
            digests = _write(temporary, plan, parts, reader, progress)
        temporary.rename(final)
    finally:
        temporary.unlink(missing_ok=True)
    receipt = manifest.receipt_of(
        shard_file.read_header(final),
        blocks.combine(digests),
        blocks.BLOCK_BYTES,
        blocks.encode(digests),
    )
    layout.publish(final.with_name(layout.receipt_name(0)), manifest.encode_receipt(receipt))
    commit(root, folder, version, clock)
    return folder


def _parts(stored: Mapping[str, StoredTensor]) -> dict[str, tuple[str, _Part]]:
    """The entries of the file: whole tensors where their parts follow one another, else parts."""
    parts: dict[str, tuple[str, _Part]] = {}
    for name, tensor in stored.items():
        if tensor_bytes.in_rows(tensor):
            parts[name] = ("", (tensor, None))
            continue
        for number, chunk in enumerate(tensor.chunks):
            key = f"{name}#{number}"
            while key in stored or key in parts:
                key += "_"
            parts[key] = (name, (tensor, chunk))
    return parts


def _spec(name: str, of: str, part: _Part) -> TensorSpec:
    tensor, chunk = part
    return TensorSpec(
        name=name,
        dtype=tensor.dtype,
        shape=tensor.shape if chunk is None else chunk.shape,
        global_shape=tensor.shape,
        offsets=(0,) * len(tensor.shape) if chunk is None else chunk.offsets,
        of=of,
    )


def _write(
    path: Path,
    plan: ShardPlan,
    parts: Mapping[str, tuple[str, _Part]],
    reader: TensorBytes,
    progress: Callable[[int], None],
) -> list[bytes]:
    """Write the file, durably; returns the digests of its blocks."""
    digests: list[bytes] = []
    block = bytearray()
    with path.open("xb") as file:

        def put(data: bytes | memoryview) -> None:
            at = 0
            while at < len(data):
                taken = data[at : at + blocks.BLOCK_BYTES - len(block)]
                block.extend(taken)
                at += len(taken)
                if len(block) == blocks.BLOCK_BYTES:
                    flush()

        def flush() -> None:
            digests.append(blocks.digest(block))
            file.write(block)
            progress(len(block))
            block.clear()

        put(plan.header)
        for spec in plan.specs:
            for data in _data(parts[spec.name][1], reader):
                put(data)
        if block:
            flush()
        file.flush()
        os.fsync(file.fileno())
    return digests


def _data(part: _Part, reader: TensorBytes) -> Iterator[memoryview]:
    tensor, chunk = part
    return reader.parts(tensor) if chunk is None else reader.pieces(chunk)
