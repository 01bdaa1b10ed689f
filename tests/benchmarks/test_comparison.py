"""What the comparison starts, and what it repeats. No system is really run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import comparison, systems
from benchmarks.comparison import FAULTS, Comparison, parse_arguments
from benchmarks.outcomes import Outcome
from benchmarks.recovery import Case
from benchmarks.systems import BY_NAME, DEFAULT, SYSTEMS, Job
from keepstep.cli.flags import BY_NAME as FLAGS
from keepstep.faults.plan import FaultPlan
from tests.benchmarks.test_page import GOOD, LATE

JOB = Job(world=2, steps=12, every=5, fault="kill@8:1", limit_s=3.0, group_timeout_s=10.0)


class Counted(Comparison):
    """Tells of each run what was asked for, instead of running it."""

    def __init__(self, words: list[str], late: str = "") -> None:
        args = parse_arguments(words)
        super().__init__(args, [BY_NAME[name] for name in args.systems], Path("."), Path("."))
        self.asked: list[tuple[str, str]] = []
        self._late = late

    def _one(self, system: systems.System, case: Case | None) -> tuple[Outcome, list[float]]:
        kind = case.kind if case else ""
        self.asked.append((system.name, kind))
        outcome = LATE if system.name == self._late and kind == "hang" else GOOD
        return dataclasses.replace(outcome, digest=None if outcome is LATE else "same"), [0.5]


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_every_command_has_fault_steps_and_its_script(
    system: systems.System, tmp_path: Path
) -> None:
    words = system.command(JOB, tmp_path)
    assert "--fault=kill@8:1" in words
    assert words[words.index("--steps") + 1] == "12"
    assert words[words.index("--every-steps") + 1] == "5"
    assert str(tmp_path) in words
    scripts = [word for word in words if word.endswith(".py")]
    assert len(scripts) == 1 and Path(scripts[0]).is_file()
    undisturbed = system.command(dataclasses.replace(JOB, fault=""), tmp_path)
    assert not [word for word in undisturbed if "--fault" in word]
    assert system.about(JOB)


def test_the_flags_of_keepstep_that_are_used_exist(tmp_path: Path) -> None:
    for name in ("native", "nvrx-tuned"):
        words = BY_NAME[name].command(JOB, tmp_path)
        own = words[words.index("run") : words.index("--steps")]
        used = {word.partition("=")[0] for word in own if word.startswith("--")}
        assert used and used <= {f"--{flag}" for flag in FLAGS}


def test_every_fault_can_be_injected_by_keepstep() -> None:
    done = Counted([])
    specs = [done.job(case).fault for case in FAULTS.values()]
    assert [str(fault) for fault in FaultPlan.parse(specs, world=2).faults] == specs
    assert [spec.partition(":")[2] for spec in specs] == ["0", "0", "1", "1"]


def test_systems_take_turns_with_each_fault() -> None:
    done = Counted(["--systems", "torchrun", "native", "--faults", "exception", "hang"])
    done.args.repeat = 2
    done.measure()
    turn = [(name, kind) for kind in ("exception", "hang") for name in ("torchrun", "native")]
    assert done.asked == [("torchrun", ""), ("native", ""), *turn, *turn]


def test_what_ran_into_the_limit_is_not_repeated_unless_asked_for() -> None:
    words = ["--systems", "torchrun", "native", "--faults", "hang"]
    done = Counted(words, late="torchrun")
    done.measure()
    assert len(done.cells["hang", "torchrun"]) == 1
    assert len(done.cells["hang", "native"]) == 3
    patient = Counted([*words, "--patient"], late="torchrun")
    patient.measure()
    assert len(patient.cells["hang", "torchrun"]) == 3


def test_systems_that_end_with_different_weights_without_a_fault_are_not_compared() -> None:
    class Different(Counted):
        def _one(self, system: systems.System, case: Case | None) -> tuple[Outcome, list[float]]:
            return dataclasses.replace(GOOD, digest=system.name), [0.5]

    with pytest.raises(SystemExit, match="did not do the same"):
        Different(["--systems", "torchrun", "native"]).measure()


def test_weights_are_compared_with_the_undisturbed_runs_that_ended() -> None:
    done = Counted(["--systems", "torchrun", "native", "--faults", "hang"], late="torchrun")
    done.measure()
    assert done.expected == "same"


def test_tables_have_a_row_for_every_system_in_order() -> None:
    done = Counted([])
    done.measure()
    assert list(done.tables()) == [comparison.TITLES[fault] for fault in FAULTS]
    for cells in done.tables().values():
        assert [cell.title for cell in cells] == [BY_NAME[name].title for name in DEFAULT]
        assert {cell.row()[-1] for cell in cells} == {"yes"}
    assert [row[2] for row in done.settings()] == ["0.500"] * len(DEFAULT)
    assert len(done.plain()) == len(DEFAULT) * len(FAULTS)


def test_the_page_shows_the_command_without_the_places_of_copies() -> None:
    words = ["--json", "a.json", "--repeat", "5", "--keep=folder", "--faults", "hang"]
    assert comparison.shown(words) == "python -m benchmarks.comparison --repeat 5 --faults hang"
