"""File systems that lack an operation, or whose answers are late or wrong, seen by real saves.

What a refusal at each single system call does is in tests/crash.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.checkpoint import catalog, verify
from tests.storage.scripts import Saver

pytestmark = [pytest.mark.training, pytest.mark.needs("strace")]


def traced(folder: Path, *inject: str, path: Path | None = None) -> list[str]:
    """A command under which every call named fails, for a script and all that it starts."""
    calls = sorted({call for one in inject for call in one.split(":")[0].split(",")})
    command = ["strace", "-f", "-qq", "-o", str(folder / "trace"), "-e", f"trace={','.join(calls)}"]
    if path is not None:
        command += ["-P", str(path)]
    return [*command, *(word for one in inject for word in ("-e", f"inject={one}"))]


NO_LINKS = "link,linkat:error={}"
NO_RENAMING = "rename,renameat,renameat2:error={}"


@pytest.mark.parametrize(
    "inject",
    [
        (NO_LINKS.format("EPERM"),),
        (NO_LINKS.format("EMLINK"),),
        (NO_LINKS.format("EOPNOTSUPP"), NO_RENAMING.format("ENOSYS")),
    ],
    ids=["no links", "too many links", "neither links nor renaming"],
)
def test_checkpoints_are_committed_and_restored_without_it(
    tmp_path: Path, inject: tuple[str, ...]
) -> None:
    root = tmp_path / "checkpoints"
    with Saver(root, before=traced(tmp_path, *inject)) as script:
        for step in (1, 2):
            assert script.ask(f"save {step}") == "ok"
            assert script.ask("finalize 30") == "ok"
        assert script.ask("restore") == "ok 2 2"
        code, told, _ = script.end()
        assert (code, told) == (0, "")
    assert "INJECTED" in (tmp_path / "trace").read_text()
    assert [one.step for one in catalog.committed(root)] == [2, 1]
    for one in catalog.committed(root):
        assert verify.verify(root, one.folder) == []
    assert not [path for path in root.rglob("*.tmp")]


def test_a_stale_handle_of_the_newest_manifest_does_not_lose_it(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    with Saver(root) as script:
        for step in (1, 2):
            assert script.ask(f"save {step}") == "ok"
            assert script.ask("finalize 30") == "ok"
        assert script.end()[0] == 0
    newest = root / "step-00000002" / "manifest.json"
    stale = traced(tmp_path, "openat:error=ESTALE:when=1..2", path=newest)
    with Saver(root, before=stale) as script:
        assert script.ask("restore") == "ok 2 2"
    assert (tmp_path / "trace").read_text().count("INJECTED") == 2
