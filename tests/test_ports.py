from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from keepstep import ports
from keepstep.ports import Finding, HealthCheck, Heartbeat, PendingWrite, Restarter, ShardWriter
from keepstep.wire.types import Version, World

T = TypeVar("T")
PROTOCOLS = (Heartbeat, PendingWrite, ShardWriter, Restarter, HealthCheck)


class Pulse:
    def __init__(self) -> None:
        self.beats: list[int] = []

    def beat(self, step: int) -> None:
        self.beats.append(step)

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        yield

    def close(self) -> None:
        self.beats.append(-1)


class Written:
    def staged(self) -> bool:
        return True

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        return


class Writer:
    def begin(self, state: Mapping[str, object], version: Version, folder: Path) -> Written:
        return Written()

    def load(self, state: Mapping[str, object], folder: Path) -> int:
        return 0

    def close(self, *, abort: bool = False) -> None:
        return


class Once:
    def run(self, attempt: Callable[[World], T]) -> T:
        return attempt(World(rank=0, size=1, local_rank=0, local_size=1, node=0, round=1))


class DiskCheck:
    name = "disk"

    def __call__(self) -> Finding:
        return Finding(check=self.name, status="ok", detail="9 GiB free")


def test_a_plain_class_with_the_right_methods_is_an_engine_s_part() -> None:
    heartbeat: Heartbeat = Pulse()
    pending: PendingWrite = Written()
    writer: ShardWriter = Writer()
    restarter: Restarter = Once()
    check: HealthCheck = DiskCheck()
    for part, protocol in zip(
        (heartbeat, pending, writer, restarter, check), PROTOCOLS, strict=True
    ):
        assert isinstance(part, protocol)
    assert restarter.run(lambda world: world.round) == 1
    assert check().action == "continue"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_class_without_the_methods_is_not(protocol: type) -> None:
    assert not isinstance(object(), protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_seam_has_at_most_four_methods(protocol: type) -> None:
    methods = [name for name, _ in inspect.getmembers(protocol, inspect.isfunction)]
    own = [name for name in methods if not name.startswith("_") or name == "__call__"]
    assert 1 <= len(own) <= 4


def test_all_seams_are_exported() -> None:
    assert {protocol.__name__ for protocol in PROTOCOLS} < set(ports.__all__)
    assert all(hasattr(ports, name) for name in ports.__all__)


def test_a_finding_survives_its_way_over_the_wire() -> None:
    finding = Finding(check="gpu", status="bad", detail="12 ECC errors", action="replace_node")
    assert msgspec.json.decode(msgspec.json.encode(finding), type=Finding) == finding
    with pytest.raises(AttributeError):
        finding.status = "ok"  # type: ignore[misc]
