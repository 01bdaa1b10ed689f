"""Ranks' output as the agent shows it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from keepstep.agent.tail import Tails


class _Shown:
    """Collects what is shown: (stream, line)."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []

    def __call__(self, stream: int, text: str) -> None:
        self.lines += [(stream, line) for line in text.split("\n")]


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_lines_are_shown_once_complete_with_their_stream_and_prefix(tmp_path: Path) -> None:
    shown = _Shown()
    tails = Tails(shown)
    out, err = tmp_path / "out", tmp_path / "err"
    out.write_bytes(b"before\nhal")
    err.write_bytes(b"")
    tails.add(1, 1, out, "[rank 3] ")
    tails.add(1, 2, err, "[rank 3] ")
    tails.poll()
    assert shown.lines == [(1, "[rank 3] before")]
    _append(out, b"f\n\nlast")
    _append(err, b"bad \xff byte\n")
    tails.poll()
    tails.end(1)
    assert shown.lines == [
        (1, "[rank 3] before"),
        (1, "[rank 3] half"),
        (1, "[rank 3] "),
        (2, "[rank 3] bad \ufffd byte"),
        (1, "[rank 3] last"),
    ]


def test_the_end_of_one_process_leaves_the_others_followed(tmp_path: Path) -> None:
    shown = _Shown()
    tails = Tails(shown)
    for ticket in (1, 2):
        (tmp_path / str(ticket)).write_bytes(b"")
        tails.add(ticket, 1, tmp_path / str(ticket), f"{ticket} ")
    tails.end(1)
    _append(tmp_path / "1", b"late\n")
    _append(tmp_path / "2", b"on\n")
    tails.poll()
    tails.end(2)
    tails.end(2)
    assert shown.lines == [(1, "2 on")]


def test_one_look_at_a_flood_shows_a_bounded_part(tmp_path: Path) -> None:
    shown = _Shown()
    tails = Tails(shown)
    path = tmp_path / "flood"
    path.write_bytes(b"0123456\n" * 100_000)
    tails.add(1, 1, path, "")
    tails.poll()
    assert 0 < len(shown.lines) < 20_000
    tails.poll()
    tails.end(1)
    assert len(shown.lines) == 100_000


def test_what_is_too_much_at_the_end_is_left_out_and_said_so(tmp_path: Path) -> None:
    shown = _Shown()
    tails = Tails(shown)
    path = tmp_path / "flood"
    lines = [f"line {number:06d}" for number in range(400_000)]
    path.write_text("\n".join(lines) + "\n")
    tails.add(1, 1, path, "> ")
    tails.poll()
    first = [line for _, line in shown.lines]
    assert first == [f"> {line}" for line in lines[: len(first)]]
    shown.lines.clear()
    tails.end(1)
    note, *rest = [line for _, line in shown.lines]
    assert rest == [f"> {line}" for line in lines[-len(rest) :]]
    assert len(rest) > 80_000
    left_out = sum(len(line) + 1 for line in lines[len(first) : -len(rest)])
    assert note == f"> ... {left_out} bytes are left out here; all of it is in {path}"


@given(st.lists(st.binary(max_size=20), max_size=20), st.sets(st.integers(0, 20)))
def test_however_output_comes_in_pieces_every_line_is_shown_once_in_order(
    pieces: list[bytes], looks: set[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shown = _Shown()
        tails = Tails(shown)
        path = Path(folder, "log")
        path.write_bytes(b"")
        tails.add(1, 1, path, "")
        for number, piece in enumerate(pieces):
            _append(path, piece)
            if number in looks:
                tails.poll()
        tails.end(1)
    *whole, last = b"".join(pieces).split(b"\n")
    expected = [line.decode(errors="replace") for line in [*whole, *([last] if last else [])]]
    assert [line for _, line in shown.lines] == expected
