"""Receipts and manifests: what a checkpoint consists of, as strict JSON.

A receipt belongs to one shard file and is written after it. The manifest is assembled from the
receipts of all ranks; it alone makes a folder a checkpoint. Its first field is a checksum of the
rest of the file, so that a changed byte in it is found before anything is believed.

Three formats. In format 1 every file is a safetensors file of our own, whose header says where each
tensor lies. In format 2 the files are those of another library (``layout``); only receipt and
manifest say in which bytes each tensor lies, so that nothing of the file has to be decoded. Format
3 is what we write: as format 1, with checksums of the blocks of each file (see ``blocks``), and a
tensor may have several chunks in the file of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import xxhash

from keepstep.checkpoint import blocks as digests
from keepstep.checkpoint import layout, tiling, typed_json
from keepstep.checkpoint.shard_file import (
    ITEM_BYTES,
    Length,
    Shape,
    ShardHeader,
    TensorSpec,
    newer_format,
)
from keepstep.errors import CheckpointCorrupt
from keepstep.wire.types import Version

FORMAT = 3
"""The newest format that is read; see ``format_of`` for the one that is written."""
_FORMATS = {1: ("safetensors",), 2: ("torch", "dcp"), 3: ("safetensors",)}
"""By format, the layouts that it can have."""

_LONGEST_NAME = 1000

Layout = Literal["safetensors", "torch", "dcp"]
"""Who made the files: we (safetensors), ``torch.save``, or torch's distributed checkpoints."""

Span = tuple[Length, Length]
"""First byte of a tensor and the byte after its last one, counted from the start of its file."""

_DIGEST_HEAD = b'{"digest":"'
_DIGEST_TAIL = b'",'
_DIGEST_SIZE = 32


class FileInfo(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A file of the checkpoint: ``size`` in bytes, ``checksum``, and whose it is.

    Without ``block_bytes`` (formats 1 and 2) the checksum is xxh3-128 of the file as 32 hex digits.
    With it, ``blocks`` holds xxh3-128 of each block of so many bytes, 32 hex digits each, the last
    block may be short, and the checksum is xxh3-128 of these digests (16 bytes each).
    """

    size: Length
    checksum: str
    rank: Length
    block_bytes: Length = 0
    blocks: str = ""

    def block_digests(self) -> tuple[bytes, ...]:
        """xxh3-128 of each block, 16 bytes each, in file order; empty if the file has none."""
        return digests.decode(self.blocks)

    def block_span(self, index: int) -> tuple[int, int]:
        """First byte of block ``index`` in the file, and the byte after its last one."""
        return digests.span(index, self.size, self.block_bytes)


class Receipt(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One rank's durable shard: ``size`` in bytes; ``checksum`` and blocks as in ``FileInfo``.

    ``values`` is the rank's non-tensor state as typed JSON, by top-level key. ``spans`` says where
    each tensor lies in a ``file`` of another library; ``others`` are further files of this rank
    that belong to the checkpoint and are never read.
    """

    format: int
    version: Version
    rank: Length
    file: str
    size: Length
    checksum: str
    tensors: dict[str, TensorSpec]
    values: dict[str, Any]
    layout: Layout = "safetensors"
    spans: dict[str, Span] = msgspec.field(default_factory=dict)
    others: dict[str, FileInfo] = msgspec.field(default_factory=dict)
    block_bytes: Length = 0
    blocks: str = ""

    @property
    def info(self) -> FileInfo:
        """The shard file as a manifest has it."""
        return FileInfo(
            size=self.size,
            checksum=self.checksum,
            rank=self.rank,
            block_bytes=self.block_bytes,
            blocks=self.blocks,
        )


class Chunk(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A part of a global tensor that ``rank``'s file holds: ``shape`` elements at ``offsets``.

    ``key`` is the name of its entry in that file; empty: the name of the tensor.
    """

    rank: Length
    offsets: Shape
    shape: Shape
    key: str = ""


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A global tensor and the chunks that tile it."""

    dtype: str
    global_shape: Shape
    chunks: tuple[Chunk, ...]


class RankTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor that only ``rank`` has (RNG state, buffers)."""

    rank: Length
    dtype: str
    shape: Shape


class Manifest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A whole checkpoint. ``created`` is wall time in seconds.

    ``values`` is typed JSON that is equal on all ranks, by top-level key; ``rank_values`` holds, by
    rank, the keys that are not. ``files`` has one file a rank; ``spans`` says, by rank, where each
    tensor lies in a file of another library; ``others`` are files that belong to the checkpoint
    and are never read.
    """

    format: int
    version: Version
    created: float
    files: dict[str, FileInfo]
    tensors: dict[str, TensorInfo]
    rank_tensors: dict[str, tuple[RankTensor, ...]]
    values: dict[str, Any]
    rank_values: dict[int, dict[str, Any]]
    layout: Layout = "safetensors"
    spans: dict[int, dict[str, Span]] = msgspec.field(default_factory=dict)
    others: dict[str, FileInfo] = msgspec.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(info.size for info in self.all_files().values())

    def all_files(self) -> dict[str, FileInfo]:
        """Every file that belongs to the checkpoint, by name."""
        return {**self.files, **self.others}

    def files_by_rank(self) -> dict[int, str]:
        """The file name of each rank's shard."""
        return {info.rank: name for name, info in self.files.items()}

    def values_of(self, rank: int) -> dict[str, Any]:
        """The non-tensor state of ``rank``, decoded. Raises as ``typed_json.decode``."""
        nodes = {**self.values, **self.rank_values.get(rank, {})}
        return {key: typed_json.decode(node, key) for key, node in nodes.items()}


def format_of(layout: Layout) -> int:
    """The format in which receipts and manifests of files of this layout are written."""
    return 3 if layout == "safetensors" else 2


def receipt_of(
    header: ShardHeader, checksum: str, block_bytes: int = 0, blocks: str = ""
) -> Receipt:
    """The receipt of a shard file with this header; of format 1 if no blocks are given."""
    return Receipt(
        format=3 if block_bytes else 1,
        version=header.version,
        rank=header.rank,
        file=layout.shard_name(header.rank),
        size=header.size,
        checksum=checksum,
        tensors=header.tensors,
        values=header.values,
        block_bytes=block_bytes,
        blocks=blocks,
    )


def assemble(receipts: Sequence[Receipt], created: float) -> Manifest:
    """The manifest of a checkpoint from the receipts of all its ranks.

    Raises:
        CheckpointCorrupt: the receipts are not one of each rank, are of different versions,
            layouts or formats, or disagree about a tensor; nothing is combined then.
    """
    if not receipts:
        raise _corrupt("there are no receipts", "")
    receipts = sorted(receipts, key=lambda receipt: receipt.rank)
    first = receipts[0]
    for receipt in receipts:
        if receipt.version != first.version:
            raise _corrupt(
                f"rank {receipt.rank} is of {receipt.version}, a lower rank of {first.version}", ""
            )
        if receipt.layout != first.layout:
            raise _corrupt(
                f"rank {receipt.rank} has {receipt.layout} files, a lower rank {first.layout}", ""
            )
        if receipt.format != first.format:
            raise _corrupt(
                f"rank {receipt.rank} has format {receipt.format}, a lower rank {first.format}", ""
            )
    tensors, rank_tensors = _merge_tensors(receipts)
    values, rank_values = _split_values(receipts)
    manifest = Manifest(
        format=first.format,
        version=first.version,
        created=created,
        files={receipt.file: receipt.info for receipt in receipts},
        tensors=tensors,
        rank_tensors=rank_tensors,
        values=values,
        rank_values=rank_values,
        layout=first.layout,
        spans={receipt.rank: receipt.spans for receipt in receipts if receipt.spans},
        others=_merge_others(receipts),
    )
    check(manifest)
    return manifest


def _merge_tensors(
    receipts: Sequence[Receipt],
) -> tuple[dict[str, TensorInfo], dict[str, tuple[RankTensor, ...]]]:
    """Tensors of all ranks with their chunks, and those of single ranks, in name order."""
    tensors: dict[str, TensorInfo] = {}
    chunks: dict[str, list[Chunk]] = {}
    rank_tensors: dict[str, list[RankTensor]] = {}
    for receipt in receipts:
        for key, spec in receipt.tensors.items():
            name = spec.of or key
            if spec.kind == "rank":
                own = RankTensor(rank=receipt.rank, dtype=spec.dtype, shape=spec.shape)
                rank_tensors.setdefault(name, []).append(own)
                continue
            whole = TensorInfo(dtype=spec.dtype, global_shape=spec.global_shape, chunks=())
            if tensors.setdefault(name, whole) != whole:
                raise _corrupt(
                    f"rank {receipt.rank} says that {name!r} is {whole.dtype} "
                    f"{list(whole.global_shape)}, a lower rank says otherwise",
                    "",
                )
            chunk = Chunk(
                rank=receipt.rank,
                offsets=spec.offsets,
                shape=spec.shape,
                key=key if spec.of else "",
            )
            chunks.setdefault(name, []).append(chunk)
    whole_tensors = {
        name: msgspec.structs.replace(tensors[name], chunks=tuple(chunks[name]))
        for name in sorted(tensors)
    }
    return whole_tensors, {name: tuple(rank_tensors[name]) for name in sorted(rank_tensors)}


def _merge_others(receipts: Sequence[Receipt]) -> dict[str, FileInfo]:
    """Further files of all ranks."""
    others: dict[str, FileInfo] = {}
    for receipt in receipts:
        for name, info in receipt.others.items():
            if name in others or info.rank != receipt.rank:
                raise _corrupt(f"rank {receipt.rank} names the file {name!r} of another rank", "")
            others[name] = info
    return others


def _split_values(receipts: Sequence[Receipt]) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Top-level values that all ranks share, and the others by rank."""
    texts = [
        {key: msgspec.json.encode(node) for key, node in receipt.values.items()}
        for receipt in receipts
    ]
    shared = {
        key: node
        for key, node in receipts[0].values.items()
        if all(text.get(key) == texts[0][key] for text in texts)
    }
    own = {
        receipt.rank: {key: node for key, node in receipt.values.items() if key not in shared}
        for receipt in receipts
    }
    return shared, {rank: nodes for rank, nodes in own.items() if nodes}


def check(manifest: Manifest, where: str = "") -> None:
    """Check that the parts of a manifest fit together.

    Raises:
        CheckpointCorrupt: a rank has no file or two, a name leads out of the folder, a file cannot
            have the blocks it is said to have, the chunks of a tensor overlap or leave a hole, or
            the bytes of one cannot lie where it says.
    """
    world = manifest.version.world
    problem = _files_problem(manifest)
    if problem:
        raise _corrupt(problem, where)
    for name, info in manifest.tensors.items():
        problem = _tensor_problem(info, world)
        if problem:
            raise _corrupt(f"tensor {name!r}: {problem}", where)
    for name, owners in manifest.rank_tensors.items():
        if len({one.rank for one in owners}) != len(owners) or any(
            one.rank >= world or one.dtype not in ITEM_BYTES for one in owners
        ):
            raise _corrupt(f"tensor {name!r} of single ranks has an impossible entry", where)
    if any(not 0 <= rank < world for rank in manifest.rank_values):
        raise _corrupt("it has values of a rank outside its world", where)
    problem = _parts_problem(manifest) or _layout_problem(manifest) or _bytes_problem(manifest)
    if problem:
        raise _corrupt(problem, where)


def _files_problem(manifest: Manifest) -> str:
    """What is wrong with ranks, names and blocks of the files; empty if nothing is."""
    world = manifest.version.world
    ranks = sorted(info.rank for info in manifest.files.values())
    if len(ranks) != world or ranks != list(range(len(ranks))) or not ranks:
        return f"its files are of the ranks {ranks[:8]}, the world has {world}"
    for name, info in manifest.all_files().items():
        if len(name) > _LONGEST_NAME:
            return f"a file name has {len(name)} characters"
        if not layout.is_plain_name(name):
            return f"the file name {name!r} leads out of the checkpoint's folder"
        problem = _blocks_problem(info, manifest.format)
        if problem:
            return f"the file {name!r}: {problem}"
    return ""


def _blocks_problem(info: FileInfo | Receipt, number: int) -> str:
    """What is wrong with the blocks of a file in format ``number``; empty if nothing is."""
    if number >= 3:
        return digests.problem(info.size, info.checksum, info.block_bytes, info.blocks)
    return f"format {number} has no blocks" if info.block_bytes or info.blocks else ""


def _parts_problem(manifest: Manifest) -> str:
    """Which entry of a rank's file is used for two parts; empty if none is."""
    used: set[tuple[int, str]] = set()
    for name, info in manifest.tensors.items():
        for chunk in info.chunks:
            part = (chunk.rank, chunk.key or name)
            if chunk.key and (manifest.format < 3 or chunk.key == name):
                return f"rank {chunk.rank} cannot have the part {chunk.key!r} of {name!r}"
            if part in used:
                return f"rank {chunk.rank} has two parts of {part[1]!r}, and bytes of one"
            used.add(part)
    for name, owners in manifest.rank_tensors.items():
        for one in owners:
            if (one.rank, name) in used:
                return f"rank {one.rank} has two parts of {name!r}, and bytes of one"
    return ""


def _bytes_problem(manifest: Manifest) -> str:
    """Which rank's tensors have more bytes than its file: nobody may make room for those."""
    held: dict[int, int] = {}
    parts = [
        (part.rank, info.dtype, part.shape)
        for info in manifest.tensors.values()
        for part in info.chunks
    ] + [
        (one.rank, one.dtype, one.shape) for many in manifest.rank_tensors.values() for one in many
    ]
    for rank, dtype, shape in parts:
        held[rank] = held.get(rank, 0) + math.prod(shape) * ITEM_BYTES[dtype]
    for info in manifest.files.values():
        if held.get(info.rank, 0) > info.size:
            return (
                f"the tensors of rank {info.rank} have {held[info.rank]:.6g} bytes, its file "
                f"{info.size}"
            )
    return ""


def _layout_problem(manifest: Manifest) -> str:
    """What is wrong with spans and further files; empty if nothing is."""
    if manifest.layout == "safetensors":
        if manifest.spans or manifest.others:
            return "it has spans or further files, which safetensors files do without"
        return ""
    both = sorted(manifest.files.keys() & manifest.others.keys())
    if both or any(info.rank >= manifest.version.world for info in manifest.others.values()):
        return f"its further files are shards too ({both[:3]}) or of a rank outside its world"
    held: dict[int, dict[str, int]] = {}
    parts = [
        (part.rank, name, info.dtype, part.shape)
        for name, info in manifest.tensors.items()
        for part in info.chunks
    ] + [
        (one.rank, name, one.dtype, one.shape)
        for name, owners in manifest.rank_tensors.items()
        for one in owners
    ]
    for rank, name, dtype, shape in parts:
        held.setdefault(rank, {})[name] = math.prod(shape) * ITEM_BYTES[dtype]
    sizes = {info.rank: info.size for info in manifest.files.values()}
    return _span_problem(manifest.spans, held, sizes)


def _span_problem(
    spans: Mapping[int, Mapping[str, Span]],
    held: Mapping[int, Mapping[str, int]],
    sizes: Mapping[int, int],
) -> str:
    """What is wrong with the spans of tensors of ``held`` bytes in files of ``sizes`` bytes."""
    if spans.keys() != held.keys():
        return f"bytes are named for the ranks {sorted(spans)}, the tensors are of {sorted(held)}"
    for rank, tensors in held.items():
        if spans[rank].keys() != tensors.keys():
            names = sorted(spans[rank].keys() ^ tensors.keys())[:3]
            return f"rank {rank}: only one of tensors and spans has {names}"
        for name, (start, stop) in spans[rank].items():
            if stop - start != tensors[name] or stop > sizes[rank]:
                return (
                    f"rank {rank}: {name!r} has {tensors[name]} bytes and lies at {start} to "
                    f"{stop} of {sizes[rank]}"
                )
    return ""


def _tensor_problem(info: TensorInfo, world: int) -> str:
    if info.dtype not in ITEM_BYTES:
        return f"its dtype {info.dtype!r} is not known"
    for chunk in info.chunks:
        spec = TensorSpec(
            name="",
            dtype=info.dtype,
            shape=chunk.shape,
            global_shape=info.global_shape,
            offsets=chunk.offsets,
        )
        problem = spec.problem()
        if problem or chunk.rank >= world:
            return problem or f"a chunk is of rank {chunk.rank}, the world has {world}"
    blocks = [(chunk.offsets, chunk.shape) for chunk in info.chunks]
    found = tiling.overlap(blocks, len(info.global_shape))
    if found is not None:
        first, second = (info.chunks[number].rank for number in found)
        return f"the chunks of ranks {first} and {second} overlap"
    return tiling.problem(info.global_shape, blocks)


def encode_receipt(receipt: Receipt) -> bytes:
    """``receipt`` as JSON; equal receipts give equal bytes."""
    return _seal(msgspec.json.encode(receipt))


def decode_receipt(data: bytes, where: str = "") -> Receipt:
    """The receipt in ``data``.

    Raises:
        CheckpointCorrupt: a byte of it changed, it is no receipt, or contradicts itself.
        CheckpointError: it was written by a newer keepstep.
    """
    receipt = _decode(data, Receipt, where)
    problem = _blocks_problem(receipt, receipt.format)
    if not problem and receipt.format < 3 and any(spec.of for spec in receipt.tensors.values()):
        problem = f"format {receipt.format} has no chunks of other tensors"
    if problem:
        raise _corrupt(problem, where)
    return receipt


def encode(manifest: Manifest) -> bytes:
    """``manifest`` as JSON; equal manifests give equal bytes."""
    return _seal(msgspec.json.encode(manifest))


def decode(data: bytes, where: str = "") -> Manifest:
    """The manifest in ``data``, checked for consistency.

    Args:
        data: Contents of ``manifest.json``.
        where: Names the file in errors.

    Raises:
        CheckpointCorrupt: a byte of it changed, it is no manifest, or it contradicts itself.
        CheckpointError: it was written by a newer keepstep.
    """
    manifest = _decode(data, Manifest, where)
    check(manifest, where)
    return manifest


class _Format(msgspec.Struct, frozen=True):
    format: int


_R = TypeVar("_R", Receipt, Manifest)


def _decode(data: bytes, kind: type[_R], where: str) -> _R:
    try:
        number = msgspec.json.decode(data, type=_Format).format
        if number > FORMAT:
            raise newer_format(number, where, FORMAT)
        record = msgspec.json.decode(_unseal(data), type=kind)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise _corrupt(str(error), where) from error
    if record.format < 1:
        raise _corrupt(f"format {record.format} does not exist", where)
    if record.layout not in _FORMATS[record.format]:
        raise _corrupt(f"format {record.format} has no {record.layout} files", where)
    return record


def _seal(text: bytes) -> bytes:
    """Put a checksum of the rest in front, as the first field of the JSON object."""
    rest = text[1:] + b"\n"
    digest = xxhash.xxh3_128_hexdigest(rest).encode()
    return b"".join((_DIGEST_HEAD, digest, _DIGEST_TAIL, rest))


def _unseal(data: bytes) -> bytes:
    start = len(_DIGEST_HEAD)
    digest = data[start : start + _DIGEST_SIZE]
    rest = data[start + _DIGEST_SIZE + len(_DIGEST_TAIL) :]
    if data != b"".join((_DIGEST_HEAD, digest, _DIGEST_TAIL, rest)):
        raise ValueError("it does not start with its checksum")
    if xxhash.xxh3_128_hexdigest(rest).encode() != digest:
        raise ValueError("its checksum differs from what was committed")
    return b"{" + rest


def _corrupt(why: str, where: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"the checkpoint's description cannot be used: {why}",
        where=where,
        done="nothing was read from the checkpoint",
        advice="use an older one; see them with 'keepstep checkpoint ls'",
    )
