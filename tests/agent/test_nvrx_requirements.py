"""What NVRx needs is asked for before anything starts, with the reason."""

from __future__ import annotations

import dataclasses
import importlib.metadata

import pytest

from keepstep.agent.nvrx_requirements import (
    Installed,
    check,
    installed,
    missing,
    nccl_problem,
    problems,
)
from keepstep.config import Config, Parts
from keepstep.config.load import load
from keepstep.errors import EngineUnavailable, ExitCode, UsageError
from keepstep.policy.nvrx_limits import nvrx_limits

GOOD = Installed(nvrx="0.4.1", torch="2.13.0+cu130", nccl="2.28.9", numpy="2.1.0")
ALL = Parts(checkpoint="nvrx", restart="nvrx", launcher="nvrx")


def config(*sets: str) -> Config:
    return load(file=None, environ={}, sets=sets, arguments={})


def test_what_is_good_is_not_complained_of() -> None:
    check(config("engine.name=nvrx"), GOOD)
    check(config("engine.name=nvrx"), dataclasses.replace(GOOD, nccl=""))


def test_a_native_run_needs_nothing() -> None:
    check(config(), Installed(nvrx="", torch="", nccl="2.28.3", numpy=""))


def test_a_missing_package_says_what_to_install() -> None:
    with pytest.raises(EngineUnavailable) as caught:
        check(config("engine.name=nvrx"), Installed(nvrx="", torch="", nccl="", numpy=""))
    assert str(caught.value) == (
        'engine "nvrx" cannot be used: the package nvidia-resiliency-ext is not installed; torch '
        "is not installed; NVRx's checkpoints need numpy, which is not installed. Nothing was "
        "started. Install them with pip install 'keepstep[nvrx]', or choose engine.name = "
        '"native".'
    )
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("version", ["0.4.0", "0.4.1-rc2", "0.3", "0.10.0", "0.4.1", "0.7.0.dev1"])
def test_a_version_that_is_too_old_is_refused(version: str) -> None:
    said = missing(ALL, dataclasses.replace(GOOD, nvrx=version))
    assert bool(said) == (version in ("0.4.0", "0.3"))


def test_numpy_is_needed_for_checkpoints_only() -> None:
    found = dataclasses.replace(GOOD, numpy="")
    assert missing(ALL, found)
    assert not missing(dataclasses.replace(ALL, checkpoint="native"), found)


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ("", True),
        ("2.26.1", False),
        ("2.26.2", True),
        ("2.27.7", True),
        ("2.28.2", True),
        ("2.28.3", False),
        ("2.28.8", False),
        ("2.28.8.1", False),
        ("2.28.9", True),
        ("2.30.1", True),
        ("3.0.0", True),
    ],
)
def test_versions_of_nccl_that_cannot_be_aborted_are_refused(version: str, good: bool) -> None:
    assert (nccl_problem(version) == "") is good


def test_versions_matter_for_in_process_restart_only() -> None:
    limits = nvrx_limits(config("engine.name=nvrx"))
    found = dataclasses.replace(GOOD, torch="2.5.0", nccl="2.28.3")
    assert len(problems(ALL, found, limits)) == 2
    assert problems(dataclasses.replace(ALL, restart="none"), found, limits) == []
    assert problems(ALL, dataclasses.replace(GOOD, torch="2.5.1"), limits) == []


def test_a_collective_that_times_out_before_the_hard_limit_is_refused() -> None:
    limits = nvrx_limits(config("engine.name=nvrx"))
    (said,) = problems(ALL, GOOD, dataclasses.replace(limits, pg_timeout=limits.hard))
    assert said.startswith("restart.pg_timeout_s is 90.0, but must be above the hard limit of 90.0")


def test_what_does_not_work_together_is_refused_with_every_reason() -> None:
    with pytest.raises(UsageError) as caught:
        check(config("engine.name=nvrx"), dataclasses.replace(GOOD, torch="2.4", nccl="2.28.5"))
    assert not isinstance(caught.value, EngineUnavailable)
    assert "torch 2.4 is installed" in str(caught.value)
    assert "NCCL 2.28.5 is installed, but in 2.28.3 to 2.28.8" in str(caught.value)


def test_the_nccl_that_counts_is_the_one_that_torch_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = {
        "torch": "2.13.0",
        "nvidia-nccl-cu12": "2.28.3",
        "nvidia-nccl-cu13": "2.28.9",
        "nvidia-resiliency-ext": "0.7.0",
    }

    def version(package: str) -> str:
        if package not in versions:
            raise importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    wanted = ["filelock", 'nvidia-nccl-cu13==2.28.9; platform_system == "Linux"']
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: wanted)
    assert installed() == Installed(nvrx="0.7.0", torch="2.13.0", nccl="2.28.9", numpy="")
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: None)
    assert installed().nccl == ""
