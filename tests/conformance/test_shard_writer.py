"""Every engine's shard writer against the suite, on real ranks."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from keepstep.testing.conformance import Result, require
from keepstep.testing.conformance.shard_writer import Ranks, clauses, verify
from tests.helpers.needs import missing, needs

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Engine:
    """An engine's shard writer: ``writer`` is its factory as module:function."""

    name: str
    writer: str
    differences: Mapping[str, str] = field(default_factory=dict)


ENGINES = [Engine("native", "keepstep.rank.checkpointer:native_writer")]
if importlib.util.find_spec("keepstep.engines.nvrx.shards") is not None:
    ENGINES += [
        Engine("nvrx-torch", "tests.conformance.nvrx:torch_writer"),
        Engine("nvrx-dcp", "tests.conformance.nvrx:dcp_writer"),
    ]


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """A file system of 16 MiB; None where none can be mounted."""
    place = tmp_path_factory.mktemp("disk")
    if missing("root"):
        yield None
        return
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def _param(engine: Engine) -> object:
    """The second of NVRx's two ways to write is part of the long matrices."""
    marks = [pytest.mark.full] if engine.name == "nvrx-dcp" else []
    return pytest.param(engine, marks=marks, id=engine.name)


@pytest.fixture(scope="module", params=[_param(engine) for engine in ENGINES])
def results(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    small_disk: Path | None,
) -> dict[str, Result]:
    """What became of each clause; the ranks are started once for all of them."""
    engine: Engine = request.param
    if engine.name.startswith("nvrx"):
        needs("nvrx")  # a module's fixture is made before the marks of a test are looked at
    folder = tmp_path_factory.mktemp(engine.name)
    place = small_disk / engine.name if small_disk else None
    with Ranks(engine.writer, folder, small_disk=place) as ranks:
        return {one.name: one for one in verify(ranks, engine.differences)}


@pytest.mark.parametrize("clause", [clause.name for clause in clauses()])
def test_the_shard_writer_keeps_the_clause(results: dict[str, Result], clause: str) -> None:
    if clause == "full-disk" and clause not in results:
        pytest.skip("needs root, to mount a small file system")
    require([results[clause]])
