"""The command of NVRx's launcher: flags that each version knows, and nothing lost of the run's."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from string import Template

import pytest

from keepstep.agent.ft_command import (
    IN_PROCESS,
    PROGRAM,
    UNLIMITED,
    WORKER,
    contradictions,
    ft_command,
    ft_environment,
    launcher_environment,
    numbers,
)
from keepstep.agent.launch_spec import Launch
from keepstep.policy.nvrx_limits import nvrx_limits
from tests.agent.launches import launch_of

VERSIONS = ("0.4.1", "0.5.0", "0.6.0", "0.7.0", "0.8.0.dev12+g5cf1ab0")
EVERYWHERE = {
    "ft-enable-nic-monitor",
    "ft-initial-rank-heartbeat-timeout",
    "ft-log-level",
    "ft-rank-heartbeat-timeout",
    "ft-rank-section-timeouts",
    "ft-rank-termination-signal",
    "ft-restart-policy",
    "ft-safety-factor",
    "ft-workload-check-interval",
    "local-addr",
    "max-restarts",
    "module",
    "monitor-interval",
    "nnodes",
    "node-rank",
    "nproc-per-node",
    "rdzv-backend",
    "rdzv-conf",
    "rdzv-endpoint",
    "rdzv-id",
    "role",
    "term-timeout",
    "workers-stop-timeout",
}
"""Flags that the sources of 0.4.1, 0.5.0, 0.6.0, 0.7.0 and main (November 2026) all define."""
ONLY = {"0.5": {"ft-use-infra-group-rank"}}
"""Flags that one version defines besides."""
SINCE_0_6 = {"ft-max-no-progress-cycles"}
"""Flags that all define from 0.6 on."""


def nvrx(*sets: str, **more: object) -> Launch:
    return launch_of("engine.name=nvrx", *sets, **more)  # type: ignore[arg-type]


def command(spec: Launch, version: str = "0.4.1") -> list[str]:
    return ft_command(
        spec,
        nvrx_limits(spec.config),
        python="/usr/bin/python3",
        rdzv_endpoint=spec.rdzv_endpoint,
        version=version,
    )


def flags(spec: Launch, version: str = "0.4.1") -> dict[str, str]:
    words = command(spec, version)
    given = [word[2:] for word in words[3:] if word.startswith("--") and word != "--module"]
    return {name: value for name, _, value in (word.partition("=") for word in given)}


# --- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("nodes", [{}, {"nnodes": 2}, {"nnodes": 2, "node_rank": 1}])
def test_no_flag_is_used_that_the_version_does_not_know(
    version: str, nodes: dict[str, int]
) -> None:
    spec = nvrx(local_addr="10.0.0.7", rdzv_is_host=True, **nodes)
    known = EVERYWHERE | ONLY.get(version[:3], set())
    known |= SINCE_0_6 if numbers(version) >= (0, 6) else set()
    assert set(flags(spec, version)) <= known


@pytest.mark.parametrize("version", VERSIONS)
def test_nvrx_does_not_judge_progress_where_it_could(version: str) -> None:
    expected = "0" if version[:3] in ("0.6", "0.7", "0.8") else None
    assert flags(nvrx(), version).get("ft-max-no-progress-cycles") == expected


def test_only_0_5_is_told_that_nodes_have_no_number_where_they_have_none() -> None:
    name = "ft-use-infra-group-rank"
    assert flags(nvrx(nnodes=2), "0.5.0")[name] == "False"
    assert name not in flags(nvrx(nnodes=2), "0.6.0")
    assert name not in flags(nvrx(), "0.5.0")
    assert name not in flags(nvrx(nnodes=2, node_rank=1), "0.5.0")
    assert name not in flags(nvrx(nnodes=2, environ={"SLURM_PROCID": "1"}), "0.5.0")


def test_the_limits_and_the_rendezvous_are_the_runs() -> None:
    spec = nvrx(
        "nvrx.soft_limit_s=4",
        "heartbeat.start_limit_s=70",
        "heartbeat.section_limit_s=80",
        "restart.join_limit_s=50.4",
        "restart.abort_limit_s=2",
        "run.grace_s=11",
        "nvrx.safety_factor=3",
    )
    given = flags(spec)
    assert given["ft-rank-heartbeat-timeout"] == "12.0"
    assert given["ft-initial-rank-heartbeat-timeout"] == "70.0"
    assert given["ft-rank-section-timeouts"] == "section:80.0"
    assert given["ft-safety-factor"] == "3.0"
    assert given["rdzv-conf"] == "join_timeout=50"
    assert (given["workers-stop-timeout"], given["term-timeout"]) == ("2.0", "11.0")
    assert (given["nnodes"], given["nproc-per-node"], given["rdzv-id"]) == ("1", "2", "r1")
    assert (given["rdzv-backend"], given["rdzv-endpoint"]) == ("c10d", "127.0.0.1:0")
    assert (given["ft-restart-policy"], given["ft-enable-nic-monitor"]) == ("any-failed", "False")
    assert given["ft-rank-termination-signal"] == "SIGKILL"


@pytest.mark.parametrize(("limit", "said"), [(-1, str(UNLIMITED)), (0, "0"), (7, "7")])
def test_the_launcher_may_restart_as_often_as_the_run(limit: int, said: str) -> None:
    assert flags(nvrx(f"restart.max_restarts={limit}"))["max-restarts"] == said


def test_several_nodes_are_named_only_where_there_are_several() -> None:
    one = flags(nvrx(local_addr="10.0.0.7", node_rank=0))
    assert not {"node-rank", "local-addr"} & set(one)
    spec = nvrx(nnodes=3, node_rank=2, local_addr="10.0.0.7", rdzv_is_host=False)
    given = flags(spec)
    assert (given["nnodes"], given["node-rank"], given["local-addr"]) == ("3", "2", "10.0.0.7")
    assert given["rdzv-conf"].endswith(",is_host=false")


# --- the command as a whole -----------------------------------------------------------------------


def test_ranks_are_keepsteps_own_module_with_the_scripts_arguments_last() -> None:
    words = command(nvrx(args=["--module", "x", "-m", ""]))
    assert words[:3] == ["/usr/bin/python3", "-c", PROGRAM]
    assert words[words.index("--module") :] == ["--module", WORKER, "--module", "x", "-m", ""]


@pytest.mark.parametrize("argument", ["$5", "${local_rank}", "$$", "a$local_rank", "plain"])
def test_a_script_gets_what_was_typed_although_the_launcher_replaces_macros(argument: str) -> None:
    handed = command(nvrx(args=[argument]))[-1]
    assert Template(handed).safe_substitute(local_rank="0") == argument


@pytest.mark.process
def test_the_installed_launcher_takes_the_command() -> None:
    """Its own parser reads it, and its own configuration understands the values."""
    try:
        version = importlib.metadata.version("nvidia-resiliency-ext")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("nvidia-resiliency-ext is not installed")
    ask = """
import json, sys
from nvidia_resiliency_ext.fault_tolerance.launcher import parse_args
from nvidia_resiliency_ext.fault_tolerance.config import FaultToleranceConfig
args = parse_args(sys.argv[1:])
found = FaultToleranceConfig.from_args(args)
print(json.dumps({
    "script": args.training_script, "rest": args.training_script_args, "module": args.module,
    "heartbeat": found.rank_heartbeat_timeout, "sections": dict(found.rank_section_timeouts),
    "signal": found.rank_termination_signal.name, "nic": found.enable_nic_monitor,
    "restarts": args.max_restarts,
}))
"""
    spec = nvrx("nvrx.soft_limit_s=4", "heartbeat.section_limit_s=80", args=["--lr", "3"])
    words = command(spec, version)[3:]
    done = subprocess.run(
        [sys.executable, "-c", ask, *words], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "script": WORKER,
        "rest": ["--lr", "3"],
        "module": True,
        "heartbeat": 13.0,
        "sections": {"section": 80.0},
        "signal": "SIGKILL",
        "nic": False,
        "restarts": UNLIMITED,
    }


# --- environment ----------------------------------------------------------------------------------


def test_in_process_restart_gets_what_it_needs_and_the_launcher_alone_does_not() -> None:
    assert ft_environment(nvrx()) == {**IN_PROCESS, "GROUP_RANK": "0"}
    assert ft_environment(launch_of("engine.launcher=nvrx")) == {"GROUP_RANK": "0"}


def test_what_the_person_has_set_stays_and_is_warned_of() -> None:
    environ = {"NCCL_NVLS_ENABLE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "GROUP_RANK": "4"}
    spec = nvrx(environ=environ)
    assert ft_environment(spec) == {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
    assert contradictions(spec) == [
        "NCCL_NVLS_ENABLE is 1, but NVRx's in-process restart needs 0; unset it, or set it so",
        "GROUP_RANK is 4, but this is node 0; NVRx's launcher numbers nodes by GROUP_RANK",
    ]


def test_nvlink_sharp_that_is_off_for_nothing_is_warned_of() -> None:
    environ = {"NCCL_NVLS_ENABLE": "0"}
    assert contradictions(nvrx(environ=environ)) == []
    (said,) = contradictions(launch_of("engine.launcher=nvrx", environ=environ))
    assert said.startswith("NCCL_NVLS_ENABLE is 0, which only NVRx's in-process restart needs")
    assert contradictions(launch_of(environ=environ)) == []


@pytest.mark.parametrize(
    ("more", "environ", "number"),
    [
        ({}, {"JOB_COMPLETION_INDEX": "3"}, "0"),
        ({"nnodes": 4}, {"JOB_COMPLETION_INDEX": "3"}, "3"),
        ({"nnodes": 4, "node_rank": 2}, {"JOB_COMPLETION_INDEX": "3"}, "2"),
        ({"nnodes": 4}, {}, None),
        ({"nnodes": 4}, {"JOB_COMPLETION_INDEX": "3", "GROUP_RANK": "1"}, None),
    ],
)
def test_a_node_has_the_number_of_its_pod(
    more: dict[str, int], environ: dict[str, str], number: str | None
) -> None:
    assert ft_environment(nvrx(environ=environ, **more)).get("GROUP_RANK") == number


def test_flags_that_torchrun_takes_from_the_environment_do_not_reach_the_launcher() -> None:
    environ = {"PET_NNODES": "9", "PETS": "2", "HOME": "/h"}
    whole = launcher_environment(nvrx(environ=environ))
    assert "PET_NNODES" not in whole
    assert whole == {"PETS": "2", "HOME": "/h", "GROUP_RANK": "0", **IN_PROCESS}


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.4.1", (0, 4, 1)), ("0.7.0.dev3+gab12", (0, 7, 0)), ("2.13.0+cu130", (2, 13, 0)), ("", ())],
)
def test_a_version_is_compared_by_its_leading_numbers(
    version: str, expected: tuple[int, ...]
) -> None:
    assert numbers(version) == expected
