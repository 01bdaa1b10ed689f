"""``keepstep run`` with NVRx's parts: what is accepted, refused, said, and shown by a dry run."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.agent.launch_spec import Launch
from keepstep.agent.nvrx_requirements import Installed
from keepstep.cli import run as run_command
from keepstep.cli.main import main
from keepstep.config import env

ALONE = ("--set", "engine.launcher=nvrx")
GOOD = Installed(nvrx="0.4.1", torch="2.13.0", nccl="", numpy="2.1.0")
TRAIN = "train.py"
TWO = ("--engine", "nvrx", "--nnodes", "2", "--rdzv-id", "job7")

Run = Callable[..., Launch]
Refuse = Callable[..., str]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Launch]]:
    """As in ``test_run``, on a machine that has NVRx 0.4.1, installed or not."""
    for name in env.snapshot():
        if name.startswith(("PET_", "KEEPSTEP_", "OMP_", "PYTHON_EXEC", "NCCL_", "TORCH_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / TRAIN).write_text("raise AssertionError('run while it was checked')\n")
    monkeypatch.setattr(run_command, "installed", lambda: GOOD)
    seen: list[Launch] = []
    agent = types.ModuleType("keepstep.agent.launch")

    def launch(spec: Launch) -> int:
        seen.append(spec)
        return 7

    agent.launch = launch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "keepstep.agent.launch", agent)
    yield seen


@pytest.fixture
def run(launched: list[Launch]) -> Run:
    def call(*arguments: str) -> Launch:
        assert main(["run", *arguments]) == 7
        return launched.pop()

    return call


@pytest.fixture
def refuse(launched: list[Launch], capsys: pytest.CaptureFixture[str]) -> Refuse:
    def call(*arguments: str) -> str:
        assert main(["run", *arguments]) == 64
        assert launched == []
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    return call


@pytest.fixture
def dry(
    launched: list[Launch], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., str]:
    """What a dry run prints; it starts nothing and leaves the folder as it was."""

    def call(*arguments: str) -> str:
        assert main(["run", "--dry-run", *arguments]) == 0
        assert launched == []
        assert [path.name for path in tmp_path.iterdir()] == [TRAIN]
        return capsys.readouterr().out

    return call


# --- the engine -----------------------------------------------------------------------------------


def test_the_engine_is_handed_over_with_what_its_ranks_need(run: Run) -> None:
    launch = run("--engine", "nvrx", TRAIN)
    parts = launch.config.engine.parts
    assert (parts.checkpoint, parts.restart, parts.launcher) == ("nvrx", "nvrx", "nvrx")
    assert launch.environ["NCCL_NVLS_ENABLE"] == "0"
    assert launch.rdzv_endpoint == "127.0.0.1:0"
    assert (launch.nnodes, launch.node_rank, launch.world) == (1, None, 1)
    assert "NCCL_NVLS_ENABLE" not in run(*ALONE, TRAIN).environ
    assert "NCCL_NVLS_ENABLE" in run("--set", "engine.restart=nvrx", TRAIN).environ
    assert "NCCL_NVLS_ENABLE" not in run(TRAIN).environ


def test_differences_and_contradictions_are_said_once_at_the_start(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(TRAIN)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    run("--engine", "nvrx", TRAIN)
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1].strip() for line in said] == [
        "difference survivors-keep-process",
        "difference learned-limits",
        "difference long-call",
        "warning",
    ]
    assert said[-1].startswith("keepstep: warning: NCCL_NVLS_ENABLE is 1")


def test_without_the_package_it_is_said_what_to_install(
    refuse: Refuse, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = Installed(nvrx="", torch="2.13.0", nccl="", numpy="")
    monkeypatch.setattr(run_command, "installed", lambda: nothing)
    said = refuse("--engine", "nvrx", TRAIN)
    assert "nvidia-resiliency-ext is not installed" in said
    assert "pip install 'keepstep[nvrx]'" in said
    run(TRAIN)


def test_a_version_of_nccl_that_hangs_is_refused(
    refuse: Refuse, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = Installed(nvrx="0.7.0", torch="2.13.0", nccl="2.28.5", numpy="2.1.0")
    monkeypatch.setattr(run_command, "installed", lambda: hanging)
    assert "NCCL 2.28.5 is installed" in refuse("--engine", "nvrx", TRAIN)
    run(*ALONE, TRAIN)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--no-python"], "--no-python cannot be honoured with NVRx's launcher"),
        (["--start-method", "fork"], "starts a fresh interpreter for each rank"),
        (["--on-hang", "report"], "NVRx ends a rank that hangs"),
        (["--set", "engine.restart=native"], "keepstep's in-process restart needs keepstep's own"),
        (["--set", "restart.pg_timeout_s=60"], "a collective must not time out before the hard"),
    ],
)
def test_what_nvrx_cannot_do_is_refused(refuse: Refuse, arguments: list[str], said: str) -> None:
    assert said in refuse("--engine", "nvrx", *arguments, TRAIN)


def test_ranks_may_be_spawned_which_they_are(run: Run) -> None:
    assert run("--engine", "nvrx", "--start-method", "spawn", TRAIN).nproc == 1


# --- several nodes --------------------------------------------------------------------------------


def test_several_nodes_meet_at_an_address_that_may_be_another_machines(run: Run) -> None:
    launch = run(
        *TWO,
        "--node-rank=1",
        "--nproc-per-node=4",
        "--rdzv-endpoint=job-0.pods.example",
        "--local-addr=10.0.0.7",
        "--rdzv-conf=is_host=false,join_timeout=70",
        "--fault=kill@3:7",
        TRAIN,
    )
    assert (launch.nnodes, launch.node_rank, launch.world) == (2, 1, 8)
    assert launch.rdzv_endpoint == "job-0.pods.example:29400"
    assert (launch.rdzv_is_host, launch.local_addr) == (False, "10.0.0.7")
    assert launch.config.restart.join_limit_s == 70
    assert launch.config.faults.inject == ("kill@3:7",)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--rdzv-endpoint", "[2001:db8::1]:7000"], "[2001:db8::1]:7000"),
        (["--master-addr", "node0", "--master-port", "7001"], "node0:7001"),
        (["--rdzv-endpoint", "node0", "--master-port", "7002"], "node0:7002"),
    ],
)
def test_the_address_may_be_given_as_with_torchrun(
    run: Run, given: list[str], expected: str
) -> None:
    assert run(*TWO, *given, TRAIN).rdzv_endpoint == expected


def test_a_range_of_nodes_may_have_one_number_only(run: Run, refuse: Refuse) -> None:
    more = ("--rdzv-endpoint", "node0", "--rdzv-id", "j")
    assert run("--engine", "nvrx", "--nnodes", "3:3", *more, TRAIN).nnodes == 3
    said = refuse("--engine", "nvrx", "--nnodes", "2:3", *more, TRAIN)
    assert "asks for a changing number of nodes" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*TWO], "--nnodes 2 needs an address at which the nodes meet"),
        ([*TWO, "--rdzv-endpoint", "node0:0"], "gives port 0, which other nodes cannot know"),
        ([*TWO, "--rdzv-endpoint", "n", "--rdzv-backend", "static"], "NVRx's launcher can use"),
        ([*TWO, "--rdzv-endpoint", "n", "--node-rank", "2"], "is out of range: 0 to 1"),
        ([*TWO, "--standalone"], "--nnodes 2 contradicts --standalone"),
        (["--engine", "nvrx", "--node-rank", "1"], "is out of range: 0 to 0"),
        (["--engine", "nvrx", "--nnodes", "0"], "a run has at least 1 node"),
        (["--engine", "nvrx", "--nnodes", "99999"], "is out of range: 1 to 65536"),
        (["--engine", "nvrx", "--rdzv-conf", "is_host=false"], "which has no meaning here"),
        (
            ["--engine", "nvrx", "--nnodes", "2", "--rdzv-endpoint", "node0"],
            "2 nodes need one run id, and none was given",
        ),
    ],
)
def test_nodes_that_cannot_meet_are_refused(
    refuse: Refuse, arguments: list[str], said: str
) -> None:
    assert said in refuse(*arguments, TRAIN)


# --- dry run --------------------------------------------------------------------------------------


SHOW = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"


def pasted(text: str, environ: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """The environment and the arguments that a shell makes of what was printed.

    In place of what would be run stands a program that shows both.
    """
    python = shlex.quote(sys.executable)
    lines = [
        f"{python} -c {shlex.quote(SHOW)} \\" if line.startswith(python) else line
        for line in text.splitlines()
    ]
    done = subprocess.run(
        ["sh", "-c", "\n".join(lines)], env=environ, capture_output=True, text=True, check=True
    )
    found, arguments = json.loads(done.stdout)
    return found, arguments


def test_a_dry_run_prints_the_launchers_command_as_a_shell_takes_it(
    dry: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    text = dry("--engine", "nvrx", TRAIN, "--name", "it's $HOME", "a b")
    found, arguments = pasted(text, {"PATH": "/usr/bin:/bin", "PET_NPROC_PER_NODE": "2"})
    assert "--nproc-per-node=2" in arguments
    assert arguments[-4:] == ["keepstep.rank.attached", "--name", "it's $$HOME", "a b"]
    assert "PET_NPROC_PER_NODE" not in found
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    assert "KEEPSTEP_ATTACH" in text


def test_a_dry_run_of_the_native_engine_shows_what_rank_0_gets(dry: Callable[..., str]) -> None:
    text = dry("--nproc-per-node", "2", TRAIN, "--lr", "3")
    found, arguments = pasted(text, {"PATH": "/usr/bin:/bin"})
    assert arguments == [TRAIN, "--lr", "3"]
    assert (found["RANK"], found["WORLD_SIZE"], found["OMP_NUM_THREADS"]) == ("0", "2", "1")
    assert "MASTER_PORT" not in found
    assert "MASTER_PORT is a free port" in text


def test_a_dry_run_sorts_its_variables_and_shows_only_what_is_added(
    dry: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    lines = [line for line in dry("--master-port", "0", TRAIN).splitlines() if "=" in line]
    names = [line.split("=")[0] for line in lines]
    assert names == sorted(names)
    assert not {"PATH", "PYTHONUNBUFFERED"} & set(names)


def test_a_dry_run_checks_what_a_run_checks(refuse: Refuse) -> None:
    assert "none.py does not exist" in refuse("--dry-run", "none.py")
    assert "NVRx ends a rank" in refuse("--dry-run", "--engine=nvrx", "--on-hang=report", TRAIN)
