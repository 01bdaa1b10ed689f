"""Seals a rank's file that another library wrote, so that the checkpoint can be committed.

Runs in the ranks, in a thread; needs no torch. Nothing of the file is decoded: the receipt says in
which bytes of it each tensor lies, and what the checksum of all of it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from keepstep.checkpoint import layout as names
from keepstep.checkpoint import manifest, torch_files, typed_json
from keepstep.checkpoint.manifest import FileInfo, Layout, Receipt
from keepstep.checkpoint.shard_file import TensorSpec
from keepstep.checkpoint.writer import owner
from keepstep.errors import CheckpointError, SaveFailed
from keepstep.wire.types import Version

_CHUNK = 16 << 20

Span = tuple[int, int]


def seal(
    root: Path,
    folder: str,
    version: Version,
    rank: int,
    *,
    layout: Layout,
    file: str,
    tensors: Sequence[TensorSpec],
    spans: Mapping[str, Span],
    values: Mapping[str, object],
    others: Sequence[str] = (),
    expected: Mapping[str, str] | None = None,
) -> Receipt:
    """Make ``rank``'s file durable and write the receipt that says what is in it.

    The file is read once. Sealing the same file again returns the receipt that is there.

    Args:
        root: Folder of all checkpoints.
        folder: Name of the version's folder under it; ``writer.claim_folder`` has made it.
        version: The state that the file belongs to.
        rank: Whose file it is.
        layout: Who wrote it; not "safetensors".
        file: Its name in the folder.
        tensors: What is in it, in any order.
        spans: For each tensor its first byte in the file and the byte after its last one; between
            them lie its elements in row-major order without gaps, little-endian.
        values: Non-tensor state by name; see ``typed_json.encode`` for what it may hold.
        others: Names of further files of this rank that belong to the checkpoint and that no
            reader needs.
        expected: By tensor, the xxh3-128 of its bytes as 32 hex digits; where given, the bytes in
            the file must have it.

    Raises:
        SaveFailed: the file is missing or not durable, its bytes are not those expected, a span
            does not fit its tensor or the file, or the folder is another version's or committed.
    """
    shown = f"{root / folder}, rank {rank}, step {version.step}"
    try:
        _check_folder(root / folder, version, rank, layout, shown)
        kept = _checked(tensors, shown)
        encoded = {key: typed_json.encode(value, key) for key, value in values.items()}
        info = _sealed_file(root / folder, rank, layout, file, kept, spans, expected or {}, shown)
        receipt = Receipt(
            format=manifest.format_of(layout),
            version=version,
            rank=rank,
            file=file,
            size=info.size,
            checksum=info.checksum,
            tensors=kept,
            values=encoded,
            layout=layout,
            spans=dict(spans),
            others={name: _other(root / folder, name, rank) for name in others},
        )
        names.sync_folder(root / folder)
        return _publish(root / folder, receipt, shown)
    except SaveFailed:
        raise
    except CheckpointError as error:
        raise _failed(error.what, error.where or shown) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _failed(f"the file {file} cannot be sealed: {reason}", shown) from error


def _check_folder(path: Path, version: Version, rank: int, layout: Layout, shown: str) -> None:
    if layout == "safetensors" or not 0 <= rank < version.world:
        raise _failed(f"there is no {layout} file of rank {rank} in {version} to seal", shown)
    if owner(path) != version:
        raise _failed(f"the folder belongs to {owner(path)}, not to {version}", shown)


def _checked(tensors: Sequence[TensorSpec], shown: str) -> dict[str, TensorSpec]:
    kept: dict[str, TensorSpec] = {}
    for spec in tensors:
        problem = "its name is used twice" if spec.name in kept else spec.problem()
        if problem:
            raise _failed(f"tensor {spec.name!r} cannot be saved: {problem}", shown)
        kept[spec.name] = spec
    return kept


def _sealed_file(
    folder: Path,
    rank: int,
    layout: Layout,
    file: str,
    tensors: Mapping[str, TensorSpec],
    spans: Mapping[str, Span],
    expected: Mapping[str, str],
    shown: str,
) -> FileInfo:
    """Size and checksum of the durable file, whose tensors are where ``spans`` says."""
    if spans.keys() != tensors.keys() or not expected.keys() <= tensors.keys():
        odd = sorted((spans.keys() ^ tensors.keys()) | (expected.keys() - tensors.keys()))
        raise _failed(f"only one of tensors and spans has {odd[:3]}", shown)
    path = names.inside(folder, file)
    size = _sync(path)
    for name, (start, stop) in spans.items():
        nbytes = tensors[name].nbytes
        if not 0 <= start <= stop <= size or stop - start != nbytes:
            raise _failed(
                f"tensor {name!r} has {nbytes} bytes and should lie at {start} to {stop} of {file}"
                f", which has {size}",
                shown,
            )
    problem = torch_files.misplaced(path, layout, spans)
    if problem:
        raise _failed(f"{file}: {problem}", shown)
    read, checksum, found = _digests(path, {name: spans[name] for name in expected})
    if read != size:
        raise _failed(f"{file} had {size} bytes and then {read}", shown)
    for name, digest in expected.items():
        if found[name] != digest:
            raise _failed(
                f"tensor {name!r} has other bytes in {file} than when the save began: "
                f"{found[name]} there, {digest} then",
                shown,
            )
    return FileInfo(size=size, checksum=checksum, rank=rank)


def _other(folder: Path, name: str, rank: int) -> FileInfo:
    path = names.inside(folder, name)
    _sync(path)
    size, checksum, _ = _digests(path, {})
    return FileInfo(size=size, checksum=checksum, rank=rank)


def _sync(path: Path) -> int:
    """Make the file durable; returns its size in bytes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _digests(path: Path, spans: Mapping[str, Span]) -> tuple[int, str, dict[str, str]]:
    """Size and checksum of the file, and the checksums of the spans, in one pass."""
    whole = xxhash.xxh3_128()
    parts = {name: xxhash.xxh3_128() for name in spans}
    waiting = sorted(spans.items(), key=lambda item: item[1], reverse=True)
    going: list[tuple[str, Span]] = []
    buffer = bytearray(_CHUNK)
    at = 0
    with path.open("rb", buffering=0) as file, memoryview(buffer) as view:
        while count := file.readinto(buffer):
            whole.update(view[:count])
            while waiting and waiting[-1][1][0] < at + count:
                going.append(waiting.pop())
            for name, (start, stop) in going:
                parts[name].update(view[max(start - at, 0) : max(min(stop - at, count), 0)])
            at += count
            going = [one for one in going if one[1][1] > at]
    return at, whole.hexdigest(), {name: part.hexdigest() for name, part in parts.items()}


def _publish(folder: Path, receipt: Receipt, shown: str) -> Receipt:
    """Write the receipt, unless an equal one is there."""
    path = folder / names.receipt_name(receipt.rank)
    committed = (folder / names.MANIFEST).exists()
    if committed and not path.exists():
        raise _failed("the version is committed already", shown)
    text = manifest.encode_receipt(receipt)
    try:
        names.publish(path, text)
    except FileExistsError:
        if path.read_bytes() != text:
            if not committed:  # it is of bytes that are not there any more
                path.unlink(missing_ok=True)
                names.sync_folder(folder)
            raise _failed("the rank's file was sealed before with other contents", shown) from None
    return receipt


def _failed(what: str, where: str) -> SaveFailed:
    return SaveFailed(
        what,
        where=where,
        done="no receipt was written, so that nothing can be committed",
        advice="the next save makes a new checkpoint; look at the errors of the library that "
        "wrote the file",
    )
