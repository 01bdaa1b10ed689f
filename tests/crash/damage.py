"""Ways in which files of a checkpoint can come to harm, drawn by hypothesis."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

_PARTS = 1 << 20


@dataclass(frozen=True)
class Damage:
    """What happens to one file of a folder.

    ``file`` and ``other`` number the folder's files in name order, modulo how many there are;
    ``at`` and ``size`` are in millionths (of 2 ** 20) of the file; ``bit`` is 0 to 7.
    """

    kind: str
    file: int
    other: int = 0
    at: int = 0
    size: int = 0
    bit: int = 0

    def do(self, folder: Path, strangers: dict[str, Path]) -> None:
        """Harm ``folder``; ``strangers`` are other checkpoints, by the kinds that take from them.

        A file that the strangers do not have is removed.
        """
        names = sorted(path.name for path in folder.iterdir())
        path = folder / names[self.file % len(names)]
        data = bytearray(path.read_bytes())
        at = self.at * len(data) // _PARTS
        size = max(1, self.size * len(data) // _PARTS)
        if self.kind in strangers:
            source = strangers[self.kind] / path.name
            path.unlink()
            if source.exists():
                path.write_bytes(source.read_bytes())
            return
        match self.kind:
            case "flip":
                if data:
                    data[at] ^= 1 << self.bit
            case "cut":
                del data[at:]
            case "zero":
                data[at : at + size] = bytes(len(data[at : at + size]))
            case "repeat":  # a block is written to the wrong place
                data[at : at + size] = data[: len(data[at : at + size])]
            case "grow":
                data += bytes(size)
            case "lose":
                path.unlink()
                return
            case "swap":
                other = folder / names[self.other % len(names)]
                path.write_bytes(other.read_bytes())
                other.write_bytes(data)
                return
            case _:
                raise AssertionError(self.kind)
        path.write_bytes(data)


def damages(strangers: list[str]) -> st.SearchStrategy[Damage]:
    """Any harm, also from other checkpoints."""
    number = st.integers(0, 15)
    part = st.integers(0, _PARTS - 1)
    return st.one_of(
        st.builds(Damage, st.just("flip"), number, at=part, bit=st.integers(0, 7)),
        st.builds(Damage, st.sampled_from(["cut", "grow"]), number, at=part, size=part),
        st.builds(Damage, st.sampled_from(["zero", "repeat"]), number, at=part, size=part),
        st.builds(Damage, st.just("swap"), number, number),
        st.builds(Damage, st.sampled_from(["lose", *strangers]), number),
    )
