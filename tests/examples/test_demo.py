"""The demo: four faults are found and the weights are equal, or its exit code says that not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import keepstep

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
SMALL = ("--nproc", "2", "--steps", "12")
LIMIT_S = 110.0


@dataclass(frozen=True)
class Outcome:
    """What one call of the demo gave."""

    exit_code: int
    out: str
    err: str

    def row(self, kind: str) -> list[str]:
        """The cells of a fault's row in the table; cells are two blanks apart."""
        rows = [line for line in self.out.splitlines() if re.match(rf"{kind} +\d+  ", line)]
        assert len(rows) == 1, self.out + self.err
        return re.split(r"\s{2,}", rows[0].strip())

    def digests(self) -> tuple[str, str]:
        """Those of the undisturbed run and of the run with faults, shortened."""
        found = re.search(r"undisturbed (\w{12})\.\.\., with faults (\w{12})\.\.\.", self.out)
        assert found is not None, self.out + self.err
        return found[1], found[2]


def start(*arguments: str, folder: Path | None = None) -> subprocess.Popen[str]:
    """The demo on a terminal of 80 columns that is a pipe; ``folder`` takes temporary files."""
    environment = {**os.environ, "COLUMNS": "80", "CUDA_VISIBLE_DEVICES": ""}
    source = str(Path(keepstep.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (source, environment.get("PYTHONPATH")))
    )
    if folder is not None:
        environment["TMPDIR"] = str(folder)
    return subprocess.Popen(
        [sys.executable, str(DEMO), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> Outcome:
    out, err = process.communicate(timeout=limit_s)
    return Outcome(process.returncode, out, err)


@dataclass(frozen=True)
class Both:
    """Two demos, the second with another seed in its disturbed run."""

    equal: Outcome
    different: Outcome
    temporary: Path
    kept: Path


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """At once: most of their time they wait for time limits."""
    temporary, kept = tmp_path_factory.mktemp("temporary"), tmp_path_factory.mktemp("kept")
    processes = [
        start(*SMALL, folder=temporary),
        start(*SMALL, "--disturbed-seed", "1", "--keep", str(kept)),
    ]
    equal, different = (ended(process) for process in processes)
    return Both(equal, different, temporary, kept)


@pytest.mark.training
def test_demo_finds_four_faults_and_ends_with_the_undisturbed_weights(both: Both) -> None:
    done = both.equal
    assert done.exit_code == 0, done.out + done.err
    assert "Final weights  EQUAL" in done.out
    first, second = done.digests()
    assert first == second
    assert "demo: all 4 faults were found" in done.out
    assert re.search(r"^Goodput \d+\.\d% of ", done.out, re.MULTILINE)


@pytest.mark.training
@pytest.mark.parametrize(
    ("kind", "rank", "found_by", "level", "lost"),
    [
        ("desync", "1", {"collective time limit"}, "rerun", "2"),
        ("exception", "0", {"reported by the rank"}, "rerun", "3"),
        ("kill", "0", {"ended by signal 9"}, "rank", "2"),
        # A machine so slow that steps teach a high limit: the waiting rank's own comes first.
        ("hang", "1", {"learned time limit", "collective time limit"}, None, "4"),
    ],
)
def test_table_says_of_each_fault_who_was_hit_how_it_was_found_and_what_it_cost(
    both: Both, kind: str, rank: str, found_by: set[str], level: str | None, lost: str
) -> None:
    cells = both.equal.row(kind)
    assert len(cells) == 8
    assert cells[1] == rank and cells[2] in found_by
    assert level is None or cells[3] == level
    for seconds in cells[4:6]:
        assert re.fullmatch(r"\d+(\.\d+)? s", seconds)
    assert cells[6:] == [lost, "yes"]


@pytest.mark.training
def test_output_of_the_disturbed_run_is_shown_and_fits_80_columns(both: Both) -> None:
    out = both.equal.out
    assert "  keepstep: round 1: 2 ranks, from the start" in out
    assert "was killed by signal 9" in out
    own = [line for line in out.splitlines() if not line.startswith("  ")]
    assert max(map(len, own)) <= 80
    assert "\x1b" not in out


@pytest.mark.training
def test_run_folders_go_unless_they_are_to_be_kept(both: Both) -> None:
    assert not list(both.temporary.glob("keepstep-demo-*"))
    assert {path.name for path in both.kept.iterdir()} == {"undisturbed", "disturbed"}
    assert list(both.kept.glob("disturbed/events/*.jsonl"))


@pytest.mark.training
def test_different_weights_are_shown_and_end_the_demo_with_1(both: Both) -> None:
    done = both.different
    assert done.exit_code == 1, done.out + done.err
    assert "Final weights  DIFFERENT" in done.out
    first, second = done.digests()
    assert first != second
    assert "demo: FAILED: the weights differ" in done.out
    assert "faults were found" not in done.out


@pytest.mark.full
@pytest.mark.training
@pytest.mark.needs("nvrx")
@pytest.mark.timeout(240)
def test_the_demo_on_nvrxs_mechanisms(tmp_path: Path) -> None:
    done = ended(start(*SMALL, "--engine", "nvrx", folder=tmp_path), 220.0)
    assert done.exit_code == 0, done.out + done.err
    assert "Final weights  EQUAL" in done.out
    levels = {kind: done.row(kind)[3] for kind in ("desync", "exception", "kill")}
    assert levels == {"desync": "rerun", "exception": "rerun", "kill": "respawn"}


@pytest.mark.process
def test_a_run_that_cannot_start_is_shown_and_ends_the_demo_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPSTEP_RESTART__SETTLE_S", "-1")
    done = ended(start(*SMALL, folder=tmp_path))
    assert done.exit_code == 1
    assert "restart.settle_s is -1" in done.out
    assert "demo: FAILED: the undisturbed run ended with exit code 64" in done.out


def test_run_folders_that_exist_are_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "disturbed").mkdir()
    done = ended(start(*SMALL, "--keep", str(tmp_path)))
    assert done.exit_code == 2
    assert "there is a folder disturbed already" in " ".join(done.err.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nproc", "1"), "with fewer than 2 ranks nobody survives a fault"),
        (("--steps", "11"), "the four faults need at least 12 steps"),
    ],
)
def test_what_the_demo_cannot_show_is_refused(arguments: Sequence[str], said: str) -> None:
    done = ended(start(*arguments))
    assert done.exit_code == 2
    assert said in " ".join(done.err.split())
