"""What observers tell one another by files: in order, once, and nothing of earlier launches."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from keepstep.agent.observe import others
from keepstep.agent.observe.others import Others, Told
from keepstep.policy import Report
from keepstep.wire.messages import JobEnd, Notice
from tests.process.job import wait_until


def _heard(by: Others, count: int) -> list[tuple[int, Told]]:
    found: list[tuple[int, Told]] = []

    def look() -> bool:
        found.extend(by.take())
        return len(found) >= count

    wait_until(look, f"{count} messages are heard")
    return found


def test_each_node_hears_those_it_listens_to_in_their_order(tmp_path: Path) -> None:
    with (
        contextlib.closing(Others(tmp_path, 0, [1, 2])) as zero,
        contextlib.closing(Others(tmp_path, 1, [0])) as one,
        contextlib.closing(Others(tmp_path, 2, [0])) as two,
    ):
        assert zero.silent == [1, 2]
        report = Report(rank=4, t=1.5, kind="exception", error="x", seqs={"0": 7}, node=1)
        told: list[Told] = [
            others.Began(rank=4, pid=77, inc=0),
            others.Failure(report=report, stack="here", t=10.0),
            others.Over(rank=4),
        ]
        for message in told:
            one.tell(message)
        assert _heard(zero, 3) == [(1, message) for message in told]
        assert zero.silent == [2]
        two.tell(others.WentOn(rank=8))
        assert _heard(zero, 1) == [(2, others.WentOn(rank=8))]
        said = others.Said(notice=Notice(kind="commit", text="step 5 is committed", step=5))
        over = others.RunOver(end=JobEnd(exit_code=76, reason="enough", graceful=False))
        zero.tell(said)
        zero.tell(over)
        for node in (one, two):
            assert _heard(node, 2) == [(0, said), (0, over)]
        assert one.silent == zero.silent == []


def test_what_an_earlier_launch_said_is_passed_over(tmp_path: Path) -> None:
    with contextlib.closing(Others(tmp_path, 1, [0])) as earlier:
        earlier.tell(others.Over(rank=1))
    with contextlib.closing(Others(tmp_path, 0, [1])) as zero:
        with contextlib.closing(Others(tmp_path, 1, [0])) as one:
            one.tell(others.Over(rank=2))
        assert _heard(zero, 1) == [(1, others.Over(rank=2))]


def test_the_last_words_are_written_before_the_end(tmp_path: Path) -> None:
    with contextlib.closing(Others(tmp_path, 1, [0])) as one:
        one.tell(others.Over(rank=3))
    [file] = (tmp_path / others.FOLDER).iterdir()
    assert msgspec.json.decode(file.read_bytes(), type=Told) == others.Over(rank=3)


def test_lines_that_are_cut_or_unknown_are_no_messages_and_no_error(tmp_path: Path) -> None:
    folder = tmp_path / others.FOLDER
    with contextlib.closing(Others(tmp_path, 0, [1])) as zero:
        line = msgspec.json.encode(others.Over(rank=5))
        (folder / "notes.txt").write_bytes(b"not ours\n")
        (folder / "x-1-1.jsonl").write_bytes(b"of no node\n")
        with (folder / "1-1-1.jsonl").open("ab", buffering=0) as file:
            file.write(b'{"type":"Newer","rank":1}\n\xff\n' + line[:5])
            file.write(line[5:] + b"\n")
        assert _heard(zero, 1) == [(1, others.Over(rank=5))]
