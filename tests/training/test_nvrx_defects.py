"""docs/nvrx.md: each reproduction of a defect still shows what the page says, and scripts run.

They run on the installed release. One that is not seen any more is good news: then the page and
what keepstep does about the defect are to be looked at again.
"""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from keepstep.config import Parts
from keepstep.policy.differences import Difference, differences

pytest.importorskip(
    "nvidia_resiliency_ext", reason="NVRx is not installed (pip install 'keepstep[nvrx]')"
)

_DOCS = Path(__file__).parents[2] / "docs"
SCRIPTS = _DOCS / "nvrx"
PAGE = _DOCS / "nvrx.md"
HELPERS = {"ranks.py"}
LIMIT_S = 90.0

SEEN = {
    "aliasing.py": "1000 of 1000 values in the file are not those of the call",
    "dead_worker.py": "the trainer still waits for it",
    "exception_copy.py": "the rank ended with HealthCheckError",
    "gloo_abort.py": "after the abort the rank was blocked for",
    "no_gpu_dcp.py": "schedule_async_request has not returned",
    "numpy_missing.py": "the package asks for no numpy",
    "orphans.py": "of its processes are there",
    "rank_0_store.py": "the other rank has neither ended nor gone on",
    "store_barrier.py": "incompatible function arguments",
    "string_annotation.py": "issubclass() arg 2 must be a class",
    "unknown_section.py": "a rank was ended by signal 9; with a section that the monitor does not "
    "know, it was not ended",
    "world_shrinks.py": "iteration and world size were 0 2, and after the death of rank 1 1 1",
}
"""What 0.4.1 does."""
ONLY_NEWER = {"no_gpu_restart.py": "the rank returned after 2 attempts"}
"""What 0.4.1 does right and newer releases do not."""


def _run(script: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, script],
        cwd=SCRIPTS,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if "this machine has a GPU" in done.stdout:
        pytest.skip("it shows what happens without a GPU, and this machine has one")
    return done


@pytest.mark.full
@pytest.mark.parametrize("script", SEEN)
def test_a_defect_is_reproduced(script: str) -> None:
    done = _run(script)
    assert SEEN[script] in done.stdout, done.stdout + done.stderr
    assert "DEFECT" in done.stdout
    assert done.returncode == 0


@pytest.mark.full
@pytest.mark.parametrize("script", ONLY_NEWER)
def test_a_defect_of_newer_releases_is_not_seen_in_this_one(script: str) -> None:
    done = _run(script)
    assert ONLY_NEWER[script] in done.stdout, done.stdout + done.stderr
    assert "not seen" in done.stdout
    assert done.returncode == 1


def test_every_reproduction_is_run_here_and_named_on_the_page() -> None:
    there = {path.name for path in SCRIPTS.glob("*.py")} - HELPERS
    assert there == SEEN.keys() | ONLY_NEWER.keys()
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in sorted(there) if f"(nvrx/{name})" not in page] == []


def test_the_diff_on_the_page_is_that_of_the_two_scripts() -> None:
    before, after = (
        (SCRIPTS / "move" / name).read_text(encoding="utf-8").splitlines()
        for name in ("before.py", "after.py")
    )
    lines = difflib.unified_diff(before, after, "before.py", "after.py", lineterm="", n=0)
    assert "```diff\n" + "\n".join(lines) + "\n```" in PAGE.read_text(encoding="utf-8")


def test_every_named_difference_is_on_the_page_in_its_own_words() -> None:
    table = PAGE.read_text(encoding="utf-8").split("\n## Named differences\n")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.*?) \| ", table, re.MULTILINE))
    known: list[Difference] = []
    for checkpoint, restart, launcher in product(
        ("native", "nvrx"), ("native", "nvrx", "none"), ("native", "nvrx")
    ):
        parts = Parts(
            checkpoint=checkpoint,  # type: ignore[arg-type]
            restart=restart,  # type: ignore[arg-type]
            launcher=launcher,  # type: ignore[arg-type]
        )
        known += differences(parts)
    assert rows == {one.clause: one.text for one in known}


@pytest.mark.slow
def test_the_script_of_the_page_runs_on_either_engine_and_goes_on_with_the_other(
    tmp_path: Path,
) -> None:
    main = "import sys; from keepstep.cli.main import main; sys.exit(main(sys.argv[1:]))"

    def run(engine: str) -> str:
        done = subprocess.run(
            [
                *(sys.executable, "-c", main, "run", "--engine", engine),
                *("--run-dir", str(tmp_path / "run"), "--nproc-per-node", "2"),
                str(SCRIPTS / "move" / "after.py"),
            ],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    assert "from the start" in run("nvrx")
    assert "resuming after step 40" in run("native")
