"""Checkpoints made by somebody who wants harm: each is one folder, and seals are right.

Whoever can write a manifest can compute its digest too, so nothing here is found by a checksum.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from torch import nn

from keepstep.checkpoint import layout
from keepstep.checkpoint.verify import file_checksum
from tests.checkpoint import foreign_files, pickles
from tests.checkpoint.dcp_folders import dcp_save
from tests.checkpoint.torch_worlds import save, version

Json = dict[str, Any]
Case = Callable[[Path, Path], None]
FOLDER = "step-00000010"
SHARD = layout.shard_name(0)
HUGE = 1 << 60
_CHUNK: Json = {"rank": 0, "offsets": [0, 0], "shape": [2, 3]}


_TENSOR = ("rank_tensors", "model.weight", 0)
"""Where the manifest of a single rank describes the weight."""


def state(fill: float = 1.0) -> dict[str, object]:
    """What the checkpoints hold before they are made hostile."""
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, fill)
    nn.init.constant_(model.bias, fill)
    return {"model": model, "data": {"own": torch.full((4,), fill), "seen": int(fill)}}


def seal(text: bytes) -> bytes:
    """A manifest or receipt with this JSON object and the digest that belongs to it."""
    rest = text[1:] + b"\n"
    return b'{"digest":"' + xxhash.xxh3_128_hexdigest(rest).encode() + b'",' + rest


def manifest_of(folder: Path) -> Json:
    """The manifest, without its digest."""
    found: Json = json.loads((folder / layout.MANIFEST).read_bytes())
    del found["digest"]
    return found


def put(folder: Path, found: Json) -> None:
    """Write a manifest that may be anything."""
    (folder / layout.MANIFEST).write_bytes(seal(json.dumps(found).encode()))


def put_shard(folder: Path, data: bytes) -> None:
    """Write other bytes as the shard, and a manifest that vouches for them."""
    found = manifest_of(folder)
    path = folder / SHARD
    path.write_bytes(data)
    info = found["files"][SHARD]
    block = xxhash.xxh3_128_hexdigest(data)
    checksum = xxhash.xxh3_128_hexdigest(bytes.fromhex(block))
    info |= {"size": len(data), "blocks": block, "checksum": checksum}
    put(folder, found)


def _changed(change: Callable[[Json], object]) -> Case:
    """A native checkpoint whose manifest was changed."""

    def make(root: Path, canary: Path) -> None:
        folder = root / save(root, state(), version(10))
        found = manifest_of(folder)
        change(found)
        put(folder, found)

    return make


def _raw(data: Callable[[Path], bytes]) -> Case:
    """A native checkpoint with other bytes as its manifest; they may name the canary."""

    def make(root: Path, canary: Path) -> None:
        folder = root / save(root, state(), version(10))
        (folder / layout.MANIFEST).write_bytes(data(canary))

    return make


def _shard(data: Callable[[bytes, Path], bytes]) -> Case:
    """A native checkpoint whose shard has other bytes, for which the manifest vouches."""

    def make(root: Path, canary: Path) -> None:
        folder = root / save(root, state(), version(10))
        put_shard(folder, data((folder / SHARD).read_bytes(), canary))

    return make


def _trap(canary: Path, protocol: int = 4) -> bytes:
    return pickles.call("os.mkdir", str(canary), protocol)


def _set(*path: str | int, to: object) -> Case:
    """The value at ``path`` in the manifest becomes ``to``."""

    def change(found: Any) -> None:
        for key in path[:-1]:
            found = found[key]
        found[path[-1]] = to

    return _changed(change)


def _named(name: str) -> Case:
    """The manifest names another file."""

    def change(found: Json) -> None:
        found["files"] = {name: found["files"][SHARD]}

    return _changed(change)


def _shared(field: str, to: object) -> Case:
    """The weight is said to be a tensor that ranks share, and its chunk is not right."""

    def change(found: Json) -> None:
        del found["rank_tensors"]["model.weight"]
        found["tensors"]["model.weight"] = {
            "dtype": "F32",
            "global_shape": [2, 3],
            "chunks": [_CHUNK | {field: to}],
        }

    return _changed(change)


def _deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def _with_text(old: str, new: str) -> Case:
    """Text is replaced in the manifest, which need not be JSON that Python would write."""

    def make(root: Path, canary: Path) -> None:
        folder = root / save(root, state(), version(10))
        text = json.dumps(manifest_of(folder))
        assert old in text
        (folder / layout.MANIFEST).write_bytes(seal(text.replace(old, new, 1).encode()))

    return make


def _header(change: Callable[[Json, Json], object]) -> Case:
    """The shard's own header is changed: safetensors' part, and ours."""

    def data(shard: bytes, canary: Path) -> bytes:
        size = int.from_bytes(shard[:8], "little")
        header = json.loads(shard[8 : 8 + size])
        ours = json.loads(header["__metadata__"]["keepstep"])
        change(header, ours)
        header["__metadata__"] = {"keepstep": json.dumps(ours)}
        text = json.dumps(header).encode()
        padded = text.ljust(-(-(len(text) + 8) // 4096) * 4096 - 8)
        return len(padded).to_bytes(8, "little") + padded + shard[8 + size :]

    return _shard(data)


def _linked(root: Path, canary: Path) -> None:
    """The shard is a symbolic link to a file outside."""
    folder = root / save(root, state(), version(10))
    outside = root.parent / "outside"
    (folder / SHARD).rename(outside)
    (folder / SHARD).symlink_to(outside)


def _loop(root: Path, canary: Path) -> None:
    """The shard is a symbolic link to itself."""
    folder = root / save(root, state(), version(10))
    (folder / SHARD).unlink()
    (folder / SHARD).symlink_to(SHARD)


def _pipe(root: Path, canary: Path) -> None:
    """The shard is a named pipe that nobody writes to: opening it waits for ever."""
    folder = root / save(root, state(), version(10))
    (folder / SHARD).unlink()
    os.mkfifo(folder / SHARD)
    found = manifest_of(folder)
    found["files"][SHARD] |= {"size": 0, "blocks": "", "block_bytes": 0}
    put(folder, found)


def _manifest_pipe(root: Path, canary: Path) -> None:
    """The manifest is a named pipe."""
    folder = root / save(root, state(), version(10))
    (folder / layout.MANIFEST).unlink()
    os.mkfifo(folder / layout.MANIFEST)


def _foreign_trap(kind: Any) -> Case:
    """A file of another library whose pickle acts, and which is otherwise right."""

    def make(root: Path, canary: Path) -> None:
        folder = root / foreign_files.save(root, [state()], version(10), kind)[1]
        name = foreign_files.file_of(kind)
        found = manifest_of(folder)
        data = (folder / name).read_bytes()
        archive = io.BytesIO(data)
        if kind == "torch":
            with zipfile.ZipFile(archive) as read:
                entry = next(one for one in read.infolist() if one.filename.endswith("data.pkl"))
            trap = _trap(canary)
            start = data.index(b"data.pkl", entry.header_offset) + len(b"data.pkl")
            start += data[start : start + 64].index(b"\x80")
            data = (
                data[:start]
                + trap[: entry.file_size].ljust(entry.file_size, b".")
                + (data[start + entry.file_size :])
            )
        else:
            data += _trap(canary)
        (folder / name).write_bytes(data)
        info = found["files"][name]
        info |= {"size": len(data), "checksum": file_checksum(folder / name)}
        put(folder, found)

    return make


def _foreign_spans(start: int, stop: int) -> Case:
    """A tensor of another library's file is said to lie elsewhere."""

    def make(root: Path, canary: Path) -> None:
        folder = root / foreign_files.save(root, [state()], version(10), "torch")[1]
        found = manifest_of(folder)
        spans = found["spans"]["0"]
        spans[next(iter(spans))] = [start, stop]
        put(folder, found)

    return make


def _bomb(root: Path, canary: Path) -> None:
    """The file of another library is an archive that unpacks to a gigabyte."""
    folder = root / foreign_files.save(root, [state()], version(10), "torch")[1]
    name = layout.torch_name(0)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        with archive.open("archive/data.pkl", "w", force_zip64=True) as entry:
            for _ in range(1 << 10):
                entry.write(bytes(1 << 20))
        for number in range(3):
            archive.writestr(f"archive/data/{number}", bytes(1 << 24))
    (folder / name).write_bytes(packed.getvalue())
    found = manifest_of(folder)
    info = found["files"][name]
    info |= {"size": len(packed.getvalue()), "checksum": file_checksum(folder / name)}
    put(folder, found)


def _unfinished(text: bytes) -> Case:
    """Beside a good checkpoint a folder without manifest that says who it belongs to."""

    def make(root: Path, canary: Path) -> None:
        folder = root / "step-00000020"
        folder.mkdir(parents=True)
        (folder / layout.VERSION_FILE).write_bytes(text)
        save(root, state(), version(10))

    return make


def _version(**changed: object) -> bytes:
    return msgspec.json.encode({**msgspec.to_builtins(version(20)), **changed})


def _dcp(change: Callable[[Path, Path], object]) -> Case:
    """A folder of torch's distributed checkpoints that was changed."""

    def make(root: Path, canary: Path) -> None:
        folder = root / "dcp"
        root.mkdir()
        dcp_save({"model": {"weight": torch.ones(4, 3)}, "step": 7}, folder)
        change(folder, canary)

    return make


def _dcp_metadata(data: Callable[[Path], bytes]) -> Case:
    return _dcp(lambda folder, canary: (folder / ".metadata").write_bytes(data(canary)))


def _dcp_value(folder: Path, canary: Path) -> None:
    """A plain value that acts when it is decoded."""
    for path in folder.glob("*.distcp"):
        path.unlink()
    (folder / ".metadata").unlink()
    dcp_save({"model": {"weight": torch.ones(4, 3)}, "x": _Calls(str(canary))}, folder)


class _Calls:
    """Unpickling this makes a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self._folder,))


def _laughs() -> bytes:
    """A pickle of tuples of tuples: a billion elements if they are copied."""
    return (
        b"\x80\x04"
        + b"("
        + b"I1\n" * 10
        + b"t"
        + b"2222222222222222222t" * 0
        + (b"\x94" + b"".join(b"(" + b"h\x00" * 10 + b"t" for _ in range(30)))
        + b"."
    )


def _dcp_bytes(old: bytes, new: bytes) -> Case:
    def change(folder: Path, canary: Path) -> None:
        path = folder / ".metadata"
        data = path.read_bytes()
        assert old in data and len(old) == len(new)
        path.write_bytes(data.replace(old, new))

    return _dcp(change)


_ONE: Json = {"$": "tuple", "v": []}


def _nested(levels: int) -> Json:
    value = _ONE
    for _ in range(levels):
        value = {"$": "tuple", "v": [value]}
    return value


NATIVE: dict[str, Case] = {
    "a pickle as manifest": _raw(_trap),
    "a pickle of protocol 0 as manifest": _raw(lambda canary: _trap(canary, 0)),
    "a sealed pickle as manifest": _raw(lambda canary: seal(_trap(canary))),
    "no manifest": _raw(lambda canary: b"{}"),
    "a manifest of one byte": _raw(lambda canary: b"\x80"),
    "a manifest that is no UTF-8": _raw(lambda canary: seal(b'{"format":3,"\xff\xfe":1}')),
    "a manifest of brackets": _raw(lambda canary: seal(b'{"a":' + b"[" * 3_000_000)),
    "a deep manifest": _raw(lambda canary: seal(_deep(200_000).encode())),
    "a manifest of digits": _raw(lambda canary: seal(b'{"format":' + b"9" * 3_000_000 + b"}")),
    "a pickle as shard": _shard(lambda shard, canary: _trap(canary)),
    "an empty shard": _shard(lambda shard, canary: b""),
    "a shard of zeros": _shard(lambda shard, canary: bytes(len(shard))),
    "a header as long as 64 bits": _shard(lambda shard, canary: b"\xff" * 8 + shard[8:]),
    "a header longer than the file": _shard(lambda shard, c: (1 << 26).to_bytes(8, "little")),
    "a header of brackets": _shard(
        lambda shard, c: (8184).to_bytes(8, "little") + b'{"__metadata__":' + b"[" * 8168
    ),
    "a name above the folder": _named(f"../{FOLDER}/{SHARD}"),
    "a name that climbs": _named("a/../../../../../etc/passwd"),
    "an absolute name": _named("/etc/passwd"),
    "an empty name": _named(""),
    "a name with a zero byte": _named("a\0b"),
    "a name that is too long": _named("x" * 70_000),
    "a name that is a folder": _named("."),
    "a link to the outside": _linked,
    "a link to itself": _loop,
    "a pipe as shard": _pipe,
    "a huge file size": _set("files", SHARD, "size", to=HUGE),
    "a negative file size": _set("files", SHARD, "size", to=-1),
    "a file size that is no number": _set("files", SHARD, "size", to="NaN"),
    "a huge block": _set("files", SHARD, "block_bytes", to=HUGE),
    "a block of one byte": _set("files", SHARD, "block_bytes", to=1),
    "blocks that are no digits": _set("files", SHARD, "blocks", to="zz" * 16),
    "blocks without end": _set("files", SHARD, "blocks", to="00" * 3_000_000),
    "a huge rank": _set("files", SHARD, "rank", to=HUGE),
    "a huge world": _set("version", "world", to=HUGE),
    "a world of minus one": _set("version", "world", to=-1),
    "a world of none": _set("version", "world", to=0),
    "a step beyond 64 bits": _set("version", "step", to=1 << 70),
    "a run that is a number": _set("version", "run", to=7),
    "a time that is none": _with_text('"created": ', '"created": NaN, "x": '),
    "a time beyond all": _with_text('"created": ', '"created": 1e999, "x": '),
    "twice the same key": _with_text('"format": 3', '"format": 3, "format": 1'),
    "a format that is a list": _set("format", to=[3]),
    "a format of minus one": _set("format", to=-1),
    "another library's layout": _set("layout", to="torch"),
    "a layout that nobody knows": _set("layout", to="pickle"),
    "a huge shape": _set(*_TENSOR, "shape", to=[HUGE, HUGE]),
    "a shape of many dimensions": _set(*_TENSOR, "shape", to=[HUGE] * 50_000),
    "a shape of many ones": _set(*_TENSOR, "shape", to=[1] * 1_000_000),
    "a negative shape": _set(*_TENSOR, "shape", to=[-2, -3]),
    "a shape of fractions": _set(*_TENSOR, "shape", to=[2.5, 3]),
    "a shape beyond 64 bits": _set(*_TENSOR, "shape", to=[1 << 90, 3]),
    "a huge tensor of plain data": _set("rank_tensors", "data.own", 0, "shape", to=[HUGE]),
    "a tensor of nobody": _set(*_TENSOR, "rank", to=5),
    "a dtype that is code": _set(*_TENSOR, "dtype", to="__import__('os')"),
    "a dtype of another size": _set(*_TENSOR, "dtype", to="F64"),
    "a tensor that is nowhere": _changed(
        lambda found: found["rank_tensors"].update(ghost=found["rank_tensors"]["model.weight"])
    ),
    "a chunk of huge size": _shared("shape", [HUGE, 3]),
    "a chunk outside": _shared("offsets", [HUGE, 0]),
    "a chunk of nobody": _shared("rank", 5),
    "a chunk of another entry": _shared("key", "model.bias"),
    "many chunks": _changed(
        lambda found: found["tensors"].update(
            {"w": {"dtype": "F32", "global_shape": [2, 3], "chunks": [_CHUNK] * 20_000}}
        )
    ),
    "values that are a list": _set("values", to=[1]),
    "a value of an unknown kind": _set("values", "data", to={"$": "os.system", "v": "x"}),
    "deep values": _set("values", "data", to=_nested(400)),
    "a value with a huge array": _set(
        "values",
        "data",
        to={"$": "ndarray", "dtype": "float64", "shape": [HUGE], "v": ""},
    ),
    "bytes that are no base64": _set("values", "data", to={"$": "bytes", "v": "\u20ac"}),
    "header: a huge shape": _header(
        lambda header, ours: header["model.weight"].update(shape=[HUGE])
    ),
    "header: bytes outside": _header(
        lambda header, ours: header["model.weight"].update(data_offsets=[HUGE, HUGE + 24])
    ),
    "header: a tensor too few": _header(lambda header, ours: header.pop("model.bias")),
}
"""Checkpoints of ours. None can be restored."""

OTHERS: dict[str, Case] = {
    "torch: a span outside": _foreign_spans(HUGE, HUGE + 24),
    "torch: a span backwards": _foreign_spans(88, 64),
}
"""Checkpoints of other libraries' files with our manifest. None can be restored."""

UNCOMMITTED: dict[str, Case] = {"a pipe as manifest": _manifest_pipe}
"""What looks as if it had never been committed."""

READABLE: dict[str, Case] = {
    "header: a huge world": _header(lambda header, ours: ours["version"].update(world=HUGE)),
    "header: deep values": _header(lambda header, ours: ours.update(values={"x": _nested(300)})),
    "torch: a span of the pickle": _foreign_spans(64, 88),
    "torch: an archive that unpacks to a gigabyte": _bomb,
    "torch: a pickle that acts": _foreign_trap("torch"),
    "dcp: a pickle that acts at the end": _foreign_trap("dcp"),
}
"""Bytes that the manifest vouches for, in files that say something else of themselves. A restore
may take them, or not; verify tells of them."""

HARMLESS: dict[str, Case] = {
    "an unfinished save of a huge world": _unfinished(_version(world=HUGE)),
    "an unfinished save of a negative world": _unfinished(_version(world=-5)),
    "an unfinished save of a step beyond 64 bits": _unfinished(_version(step=1 << 80)),
    "an unfinished save of brackets": _unfinished(b"[" * 1_000_000),
    "an unfinished save of no UTF-8": _unfinished(b'"\xff"'),
}
"""What does not keep a restore from the right state, and must not act."""

DCP: dict[str, Case] = {
    "a trap as metadata": _dcp_metadata(_trap),
    "a trap of protocol 0 as metadata": _dcp_metadata(lambda canary: _trap(canary, 0)),
    "no metadata": _dcp_metadata(lambda canary: b""),
    "a list as metadata": _dcp_metadata(lambda canary: b"\x80\x04]."),
    "a billion laughs": _dcp_metadata(lambda canary: _laughs()),
    "bytes of 64 bits": _dcp_metadata(lambda canary: b"\x80\x04\x8e" + b"\xff" * 7 + b"\x0f."),
    "a number of a gigabyte": _dcp_metadata(lambda canary: b"\x80\x04\x8b\xff\xff\xff\x3f."),
    "marks without end": _dcp_metadata(lambda canary: b"\x80\x04" + b"(" * 3_000_000 + b"."),
    "a frame of 64 bits": _dcp_metadata(lambda canary: b"\x80\x04\x95" + b"\xff" * 8 + b"."),
    "a file name that climbs": _dcp_bytes(b"__0_0.distcp", b"../../passwd"),
    "an absolute file name": _dcp_bytes(b"__0_0.distcp", b"/etc/passwdd"),
}
"""Folders of torch's distributed checkpoints, for import and as something to resume from."""

DCP_READABLE: dict[str, Case] = {"a value that acts": _dcp(_dcp_value)}
"""Folders of which a part can be used; the rest is left out, and the reader is told."""
