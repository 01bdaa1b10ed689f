"""Staged images as the writer process sees them: the slots' memory, mapped once for many saves.

Mapping a slot anew for each save costs a page fault for every few pages of it, about as much
processor time as hashing it; that time is taken from training.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

KEPT = 4
"""A mapping goes when its rank has filled so many other slots since: it has new ones by then."""

_Key = tuple[int, int]


@dataclass(slots=True)
class _Mapping:
    memory: mmap.mmap
    rank: int
    used: int


class Images:
    """Memory of slots. Safe to use from several threads.

    A mapping keeps the slot's memory alive after its owner has closed it. An owner that wants it
    back at once truncates the slot first: a mapping of nothing holds nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[_Key, _Mapping] = {}
        self._uses: dict[int, int] = {}

    @contextlib.contextmanager
    def open(self, fd: int, size: int, rank: int) -> Iterator[memoryview]:
        """The first ``size`` bytes of ``rank``'s slot ``fd``, read-only.

        Raises:
            ValueError: the slot does not hold so much.
            OSError: it cannot be mapped.
        """
        found = os.fstat(fd)
        if not 0 < size <= found.st_size:
            raise ValueError(f"{size} bytes were announced, the staged image has {found.st_size}")
        key = (found.st_dev, found.st_ino)  # unique as long as a mapping holds the slot
        with self._lock:
            mapping = self._kept.pop(key, None)
        if mapping is None or len(mapping.memory) != found.st_size:
            memory = mmap.mmap(fd, found.st_size, prot=mmap.PROT_READ)
            mapping = _Mapping(memory=memory, rank=rank, used=0)
        try:
            with memoryview(mapping.memory) as whole, whole[:size] as image:
                yield image
        finally:
            self._keep(key, mapping, rank)

    def _keep(self, key: _Key, mapping: _Mapping, rank: int) -> None:
        with self._lock:
            now = self._uses[rank] = self._uses.get(rank, 0) + 1
            mapping.rank, mapping.used = rank, now
            self._kept[key] = mapping
            gone = [
                other
                for other, one in self._kept.items()
                if one.rank == rank and now - one.used >= KEPT
            ]
            for other in gone:
                del self._kept[other]  # unmapped as soon as nothing looks at it

    def __len__(self) -> int:
        """How many slots are mapped and not in use."""
        return len(self._kept)
