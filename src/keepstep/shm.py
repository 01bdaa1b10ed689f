"""A rank's board: one shared-memory page it writes, and a ring of event lines.

The memory is an anonymous file (memfd) made by the agent and passed by descriptor: it has no name
to leak, ends with its last holder, and survives the SIGKILL of the rank. The rank only stores and
never waits; the agent only reads, except for the ring's tail.

Layout (native 8-byte words): see ``_Word``; the ring starts at ``RING_AT``. Each word has one
writer. A word is stored in one aligned 8-byte write, so a reader sees the old or the new value.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import threading

import msgspec

NAME = "keepstep-board"
"""Name of a board's memory in /proc/PID/maps."""
SEQS_AT = 1024
SEQS_BYTES = 3072
RING_AT = 4096
RING_BYTES = 1 << 20
SIZE = RING_AT + RING_BYTES
_LINE = struct.Struct("<I")


class Phase(enum.IntEnum):
    """What a rank is doing; each has its own learned limit."""

    PARKED = 0
    START = 1
    LOAD = 2
    STEP = 3
    SAVE = 4
    SECTION = 5
    WAIT = 6
    EXIT = 7
    SCRIPT = 8


class _Word(enum.IntEnum):
    BEAT = 0  # float: when the heartbeat thread last ran
    PROGRESS = 1  # float: when the main thread last showed progress
    PHASE = 2  # int: Phase
    STEP = 3  # int: step in progress (or completed, between steps)
    DONE = 4  # int: last completed step
    ROUND = 5  # int: round the rank is in
    SEQ = 6  # int: collectives entered, over all groups
    STEP_S = 7  # float: length of the last completed step
    LOSS = 8  # float: last loss given, NaN if none
    HEAD = 9  # int: bytes ever put into the ring (rank)
    TAIL = 10  # int: bytes ever taken out (agent)
    DROPPED = 11  # int: lines that found the ring full (rank)
    STEPS = 12  # int: steps completed by this process
    SEQS = 13  # int: changes of the text at SEQS_AT; odd while it is being written
    PID = 14  # int: process that took the board by itself (0: the agent knows it)
    STOP = 15  # int: step after which the rank is to stop, 0: none (watcher)
    LABEL = 16  # 64 bytes of UTF-8: name of the section
    INC = 24  # int: how many processes have taken the board by themselves
    ADMITTED = 25  # int: newest round that may begin (watcher)


def create() -> int:
    """A new board; returns its descriptor (close-on-exec)."""
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE)
    return fd


class Board:
    """View of a board. The rank's and the agent's ends use the same class.

    Args:
        fd: Descriptor from ``create``; it may be closed afterwards.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, SIZE)
        # Typed views store and load a word at once. (struct.pack_into zeroes the place first, so a
        # reader in another process can see a time of 0: a rank that was idle since boot.)
        self._whole = memoryview(self._map)
        self._ints = self._whole[:RING_AT].cast("q")
        self._floats = self._whole[:RING_AT].cast("d")
        self._lock = threading.Lock()

    def close(self) -> None:
        """Unmap."""
        for view in (self._ints, self._floats, self._whole):
            view.release()
        self._map.close()

    def _get_int(self, word: int) -> int:
        return self._ints[word]

    def _put_int(self, word: int, value: int) -> None:
        self._ints[word] = value

    def _get_float(self, word: int) -> float:
        return self._floats[word]

    def _put_float(self, word: int, value: float) -> None:
        self._floats[word] = value

    # --- written by the rank ------------------------------------------------------------------

    def beat(self, now: float, seq: int) -> None:
        """The heartbeat thread ran at ``now``; ``seq`` collectives were entered so far."""
        self._put_float(_Word.BEAT, now)
        self._put_int(_Word.SEQ, seq)

    def put_sequence_numbers(self, numbers: dict[str, int]) -> None:
        """Collectives entered by group; left out if the names are too long."""
        text = msgspec.json.encode(numbers)
        if len(text) > SEQS_BYTES - 8:
            text = b"{}"
        turn = self._get_int(_Word.SEQS)
        self._put_int(_Word.SEQS, turn + 1)
        self._map[SEQS_AT : SEQS_AT + 8 + len(text)] = len(text).to_bytes(8, "little") + text
        self._put_int(_Word.SEQS, turn + 2)

    def enter(self, phase: Phase, now: float, label: str = "") -> None:
        """The main thread enters ``phase``."""
        text = label.encode()[:63]
        self._map[_Word.LABEL * 8 : _Word.LABEL * 8 + 64] = text + bytes(64 - len(text))
        self._put_int(_Word.PHASE, int(phase))
        self._put_float(_Word.PROGRESS, now)

    def begin_step(self, step: int, now: float) -> None:
        """``step`` is in progress."""
        self._put_int(_Word.STEP, step)
        self.enter(Phase.STEP, now)

    def end_step(self, step: int, seconds: float, loss: float) -> None:
        """``step`` is completed after ``seconds``; ``loss`` may be NaN."""
        self._put_float(_Word.STEP_S, seconds)
        self._put_float(_Word.LOSS, loss)
        self._put_int(_Word.STEPS, self._get_int(_Word.STEPS) + 1)
        self._put_int(_Word.DONE, step)

    def enter_round(self, number: int, resume: int) -> None:
        """The rank is in round ``number``, from step ``resume``."""
        self._put_int(_Word.STEP, resume)
        self._put_int(_Word.DONE, resume)
        self._put_int(_Word.ROUND, number)

    def take(self, pid: int) -> int:
        """Process ``pid`` is the rank now, where no agent says so; clears what was there before.

        Returns:
            The process's incarnation: 0 for the first that took the board.
        """
        incarnation = self._get_int(_Word.INC)
        self._put_int(_Word.INC, incarnation + 1)
        for word in (_Word.BEAT, _Word.PROGRESS, _Word.STEP, _Word.DONE, _Word.ROUND, _Word.SEQ):
            self._put_int(word, 0)
        for word in (_Word.STEP_S, _Word.LOSS, _Word.STEPS):
            self._put_int(word, 0)
        self._put_int(_Word.PID, pid)
        return incarnation

    @property
    def stop_signal(self) -> int:
        """Number of the signal that asks the rank to stop (0: none)."""
        return self._get_int(_Word.STOP)

    @property
    def admitted(self) -> int:
        """The newest round that may begin (0: none), where a watching process decides that."""
        return self._get_int(_Word.ADMITTED)

    def put_line(self, line: bytes) -> bool:
        """Append ``line`` to the ring; False (and counted) if there is no room."""
        with self._lock:
            head, tail = self._get_int(_Word.HEAD), self._get_int(_Word.TAIL)
            record = _LINE.pack(len(line)) + line
            if head + len(record) - tail > RING_BYTES:
                self._put_int(_Word.DROPPED, self._get_int(_Word.DROPPED) + 1)
                return False
            at = head % RING_BYTES
            first = min(len(record), RING_BYTES - at)
            self._map[RING_AT + at : RING_AT + at + first] = record[:first]
            if first < len(record):
                self._map[RING_AT : RING_AT + len(record) - first] = record[first:]
            self._put_int(_Word.HEAD, head + len(record))
            return True

    # --- read by the agent ----------------------------------------------------------------------

    @property
    def last_beat(self) -> float:
        """When the heartbeat thread last ran (0: never)."""
        return self._get_float(_Word.BEAT)

    @property
    def last_progress(self) -> float:
        """When the main thread last showed progress (0: never)."""
        return self._get_float(_Word.PROGRESS)

    @property
    def phase(self) -> Phase:
        """What the rank is doing."""
        return Phase(self._get_int(_Word.PHASE))

    @property
    def label(self) -> str:
        """Name of the section, if in one."""
        raw = self._map[_Word.LABEL * 8 : _Word.LABEL * 8 + 64]
        return raw.split(b"\0", 1)[0].decode(errors="replace")

    @property
    def step(self) -> int:
        """Step in progress."""
        return self._get_int(_Word.STEP)

    @property
    def done(self) -> int:
        """Last completed step."""
        return self._get_int(_Word.DONE)

    @property
    def round(self) -> int:
        """Round the rank is in (0: none yet)."""
        return self._get_int(_Word.ROUND)

    @property
    def seq(self) -> int:
        """Collectives entered, over all groups."""
        return self._get_int(_Word.SEQ)

    @property
    def sequence_numbers(self) -> dict[str, int]:
        """Collectives entered by group; empty if none were told, or just now being written."""
        turn = self._get_int(_Word.SEQS)
        size = int.from_bytes(self._map[SEQS_AT : SEQS_AT + 8], "little")
        text = self._map[SEQS_AT + 8 : SEQS_AT + 8 + min(size, SEQS_BYTES - 8)]
        if turn == 0 or turn % 2 or turn != self._get_int(_Word.SEQS):
            return {}
        return msgspec.json.decode(text, type=dict[str, int])

    @property
    def step_s(self) -> float:
        """Length of the last completed step in seconds."""
        return self._get_float(_Word.STEP_S)

    @property
    def loss(self) -> float:
        """Last loss given, NaN if none."""
        return self._get_float(_Word.LOSS)

    @property
    def steps(self) -> int:
        """Steps completed by this process."""
        return self._get_int(_Word.STEPS)

    @property
    def dropped(self) -> int:
        """Event lines lost because the ring was full."""
        return self._get_int(_Word.DROPPED)

    @property
    def pid(self) -> int:
        """The process that took the board by itself (0: none did)."""
        return self._get_int(_Word.PID)

    @property
    def incarnation(self) -> int:
        """Which process in a row has the board (0: the first); only after ``pid`` is set."""
        return max(0, self._get_int(_Word.INC) - 1)

    def ask_stop(self, number: int) -> None:
        """Signal ``number`` asks the rank to stop; ``stop_signal`` tells it."""
        self._put_int(_Word.STOP, number)

    def admit(self, number: int) -> None:
        """Rounds up to ``number`` may begin; a lower number than before changes nothing."""
        if number > self._get_int(_Word.ADMITTED):
            self._put_int(_Word.ADMITTED, number)

    def take_lines(self) -> list[bytes]:
        """Take all complete lines out of the ring."""
        lines: list[bytes] = []
        tail, head = self._get_int(_Word.TAIL), self._get_int(_Word.HEAD)
        while tail < head:
            (length,) = _LINE.unpack(self._ring(tail, _LINE.size))
            lines.append(self._ring(tail + _LINE.size, length))
            tail += _LINE.size + length
        self._put_int(_Word.TAIL, tail)
        return lines

    def _ring(self, at: int, length: int) -> bytes:
        at %= RING_BYTES
        first = min(length, RING_BYTES - at)
        data = self._map[RING_AT + at : RING_AT + at + first]
        return data + self._map[RING_AT : RING_AT + length - first]
