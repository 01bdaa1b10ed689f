"""A failure that meets another rank in the middle of an import, under NVRx's restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.job import Job

SCRIPT = """
import sys, time
from pathlib import Path
import keepstep

folder = Path(sys.argv[1])
fired = folder / "fired"

def main(job):
    first = not fired.exists()
    if job.world.rank == 0:
        import package
        assert package.part is not None
    elif first:
        while not (folder / "importing").exists():
            time.sleep(0.01)
        fired.touch()
        raise ValueError("while the other rank imports")
    for _ in job.steps(3):
        pass

keepstep.run(main)
"""
PACKAGE = """
import time
from pathlib import Path
import package.part

(Path(__file__).parents[1] / "importing").touch()
end = time.monotonic() + 1.5
while time.monotonic() < end:
    time.sleep(0.01)
part = package.part
"""


@pytest.mark.needs("nvrx")
def test_an_import_of_another_rank_is_not_cut_in_two(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "package" / "part.py").touch()
    flags = ("--engine", "nvrx", "--set", "nvrx.soft_limit_s=3")
    with Job(tmp_path, SCRIPT, flags=flags, arguments=[str(tmp_path)], nproc=2) as job:
        assert job.wait() == 0, job.ending
        data = job.data("restart.cause")
    assert [(one["cause"], one["guilty"], one["level"]) for one in data] == [
        ("exception", 1, "rerun")
    ]
