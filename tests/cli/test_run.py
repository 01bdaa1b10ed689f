"""``keepstep run`` as a person types it: every flag of torchrun's, bad input, and the hand-over."""

from __future__ import annotations

import socket
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.agent.launch_spec import TORCHRUN_SIGNALS, Launch
from keepstep.cli.flags import BY_NAME, FLAGS
from keepstep.cli.main import main
from keepstep.config import env

Run = Callable[..., Launch]
Refuse = Callable[..., str]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Launch]]:
    """The launches handed to a stand-in for the agent; the working folder holds ``train.py``."""
    for name in env.snapshot():
        if name.startswith(("PET_", "KEEPSTEP_", "OMP_", "PYTHON_EXEC")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise AssertionError('run while it was checked')\n")
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
    """Start ``keepstep run`` with arguments that are right; gives what the agent got."""

    def call(*arguments: str) -> Launch:
        assert main(["run", *arguments]) == 7
        return launched.pop()

    return call


@pytest.fixture
def refuse(launched: list[Launch], capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Start ``keepstep run`` with arguments that are wrong; gives the message."""

    def call(*arguments: str, code: int = 64) -> str:
        assert main(["run", *arguments]) == code
        assert launched == []
        said = capsys.readouterr().err
        assert said.startswith("keepstep: error: ")
        assert "Traceback" not in said
        return said

    return call


# --- torchrun's flags -----------------------------------------------------------------------------

Honoured = tuple[str | None, str, Callable[[Launch], object], object]
TRAIN = "train.py"

HONOURED: dict[str, Honoured] = {
    "nnodes": ("1:1", TRAIN, lambda launch: launch.nproc, 1),
    "nproc-per-node": ("3", TRAIN, lambda launch: launch.nproc, 3),
    "rdzv-backend": ("c10d", TRAIN, lambda launch: launch.nproc, 1),
    "rdzv-endpoint": ("localhost:0", TRAIN, lambda launch: launch.master_addr, "localhost"),
    "rdzv-id": ("job7", TRAIN, lambda launch: launch.run_id, "job7"),
    "rdzv-conf": (
        "join_timeout=77",
        TRAIN,
        lambda launch: launch.config.restart.join_limit_s,
        77.0,
    ),
    "standalone": (None, TRAIN, lambda launch: launch.master_port, 0),
    "max-restarts": ("4", TRAIN, lambda launch: launch.config.restart.max_restarts, 4),
    "monitor-interval": ("0.5", TRAIN, lambda launch: launch.config.heartbeat.interval_s, 0.5),
    "start-method": ("spawn", TRAIN, lambda launch: launch.config.rank.start_method, "spawn"),
    "role": ("trainer", TRAIN, lambda launch: launch.role, "trainer"),
    "module": (None, "json.tool", lambda launch: launch.mode, "module"),
    "no-python": (None, "true", lambda launch: launch.mode, "program"),
    "run-path": (None, "ABSOLUTE", lambda launch: launch.mode, "script"),
    "log-dir": ("here", TRAIN, lambda launch: launch.log_dir.name, "here"),
    "redirects": ("3", TRAIN, lambda launch: launch.redirects, {0: 3}),
    "tee": ("2", TRAIN, lambda launch: launch.tee, {0: 2}),
    "local-ranks-filter": ("0", TRAIN, lambda launch: launch.local_ranks_filter, (0,)),
    "node-rank": ("0", TRAIN, lambda launch: launch.nproc, 1),
    "master-addr": ("localhost", TRAIN, lambda launch: launch.master_addr, "localhost"),
    "master-port": ("FREE", TRAIN, lambda launch: launch.master_port, "FREE"),
    "local-addr": ("localhost", TRAIN, lambda launch: launch.master_addr, "localhost"),
    "signals-to-handle": (
        "SIGTERM,SIGUSR1",
        TRAIN,
        lambda launch: launch.notice_signals,
        ("SIGTERM", "SIGUSR1"),
    ),
    "shutdown-timeout": ("12", TRAIN, lambda launch: launch.config.run.grace_s, 12.0),
}
"""By flag: a value (``None``: takes none), a target, and what must come of it."""

REFUSED: dict[str, str | None] = {
    "event-log-handler": "console",
    "duplicate-stdout-filters": "loss",
    "duplicate-stderr-filters": "loss",
    "logs-specs": "mine",
    "numa-binding": "node",
    "virtual-local-rank": None,
}
"""By flag: a value that torchrun takes."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def filled(case: Honoured) -> Honoured:
    value, target, read, expected = case
    if value == "FREE":
        port = free_port()
        return str(port), target, read, port
    return value, str(Path(TRAIN).absolute()) if target == "ABSOLUTE" else target, read, expected


def test_every_flag_of_torchrun_is_either_honoured_or_refused() -> None:
    """torchrun's own parser is asked, so that a flag that it gains fails here."""
    from torch.distributed.run import get_args_parser

    ours = set(HONOURED) | set(REFUSED)
    assert not set(HONOURED) & set(REFUSED)
    theirs: set[str] = set()
    for action in get_args_parser()._actions:
        if action.option_strings and action.dest != "help":
            name = action.dest.replace("_", "-")
            theirs.add(name)
            flag = BY_NAME[name]
            spelt = {f"--{name}", f"--{flag.parameter}"}
            if flag.short:
                spelt.add(f"-{flag.short}")
            assert set(action.option_strings) <= spelt
            assert flag.switch == (action.nargs == 0)
            reads_variable = type(action).__name__ in ("env", "check_env")
            assert flag.pet == reads_variable, name
            assert bool(flag.refused) == (name in REFUSED)
    assert theirs == ours
    assert theirs | {flag.name for flag in FLAGS if not flag.pet} == set(BY_NAME)


@pytest.mark.parametrize("spelling", ["dashes", "underscores", "equals"])
@pytest.mark.parametrize("name", HONOURED)
def test_a_flag_is_honoured_in_every_spelling(run: Run, name: str, spelling: str) -> None:
    value, target, read, expected = filled(HONOURED[name])
    flag = "--" + (name.replace("-", "_") if spelling != "dashes" else name)
    if value is None:
        given = [flag]
    else:
        given = [f"{flag}={value}"] if spelling == "equals" else [flag, value]
    assert read(run(*given, target)) == expected


@pytest.mark.parametrize("name", HONOURED)
def test_a_variable_stands_in_for_a_flag(
    run: Run, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, target, read, expected = filled(HONOURED[name])
    monkeypatch.setenv(BY_NAME[name].variable, "1" if value is None else value)
    assert read(run(target)) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_a_flag_that_cannot_be_honoured_is_refused_with_a_reason(refuse: Refuse, name: str) -> None:
    value = REFUSED[name]
    said = refuse(f"--{name}", *([] if value is None else [value]), TRAIN)
    assert f"--{name} cannot be honoured: {BY_NAME[name].refused}" in said
    assert BY_NAME[name].instead in said


@pytest.mark.parametrize("name", [name for name in REFUSED if BY_NAME[name].pet])
def test_a_variable_that_cannot_be_honoured_is_refused_too(
    refuse: Refuse, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BY_NAME[name].variable, REFUSED[name] or "1")
    assert f"{BY_NAME[name].variable} cannot be honoured" in refuse(TRAIN)


def test_a_refused_flag_may_have_torchruns_default(run: Run) -> None:
    assert run("--event-log-handler", "null", TRAIN).nproc == 1


def test_a_switch_that_its_variable_turns_off_is_off(
    run: Run, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_MODULE", "0")
    monkeypatch.setenv("PET_VIRTUAL_LOCAL_RANK", "0")
    assert run(TRAIN).mode == "script"
    monkeypatch.setenv("PET_MODULE", "yes")
    assert "PET_MODULE is 'yes' but must be 0 or 1" in refuse(TRAIN)


def test_the_short_flags_are_there(run: Run) -> None:
    assert run("-t", "1", "-r3", TRAIN).tee == {0: 1}
    assert run("-r3", TRAIN).redirects == {0: 3}
    assert run("-m", "json.tool").mode == "module"


def test_what_is_teed_is_shown_although_it_is_redirected(run: Run) -> None:
    launch = run("--nproc-per-node", "2", "-r", "3", "-t", "1:1", TRAIN)
    assert launch.tee == {0: 0, 1: 1}
    assert launch.redirects == {0: 3, 1: 2}


def test_what_is_typed_counts_before_the_variable(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_MASTER_ADDR", "another-machine.example")
    launch = run("--nproc-per-node", "2", "--rdzv-endpoint", "localhost", TRAIN)
    assert (launch.nproc, launch.master_addr, launch.master_port) == (2, "localhost", 0)


def test_a_variable_for_a_setting_is_weaker_than_set(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    assert run(TRAIN).config.restart.max_restarts == 3
    chosen = run("--set", "restart.max_restarts=5", TRAIN)
    assert chosen.config.restart.max_restarts == 5
    chosen = run("--set", "restart.max_restarts=5", "--max-restarts", "6", TRAIN)
    assert chosen.config.restart.max_restarts == 6
    monkeypatch.setenv("KEEPSTEP_RESTART__MAX_RESTARTS", "4")
    assert run(TRAIN).config.restart.max_restarts == 4


def test_a_wrong_variable_is_called_by_its_name(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_MONITOR_INTERVAL", "often")
    assert "PET_MONITOR_INTERVAL often is not a number of seconds" in refuse(TRAIN)


# --- the script's own arguments -------------------------------------------------------------------


def test_everything_after_the_script_belongs_to_the_script(run: Run) -> None:
    theirs = ["--nproc-per-node", "9", "--set_x=a_b", "-m", "--", "--help", ""]
    launch = run("--nproc-per-node", "2", TRAIN, *theirs)
    assert launch.args == theirs
    assert (launch.nproc, launch.mode, launch.target) == (2, "script", TRAIN)
    assert launch.argv == ["keepstep", "run", "--nproc-per-node", "2", TRAIN, *theirs]


def test_two_dashes_before_the_script_end_our_flags(run: Run) -> None:
    assert run("--", TRAIN, "--tee").args == ["--tee"]


def test_values_of_flags_keep_their_underscores(run: Run) -> None:
    assert run("--role", "my_role", "--log_dir=my_logs", TRAIN).role == "my_role"


# --- our own flags --------------------------------------------------------------------------------


def test_without_flags_the_defaults_are_torchruns_or_safer(run: Run, tmp_path: Path) -> None:
    launch = run(TRAIN)
    assert launch.nproc == 1
    assert (launch.master_addr, launch.master_port) == ("127.0.0.1", 0)
    assert launch.run_dir == tmp_path / "runs" / launch.run_id
    assert launch.log_dir == launch.run_dir / "logs"
    assert launch.log_dir.is_dir()
    assert launch.config.run.id == launch.run_id
    assert launch.config.run.dir == str(launch.run_dir)
    assert launch.notice_signals == TORCHRUN_SIGNALS
    assert launch.local_ranks_filter is None
    assert launch.environ["PYTHONUNBUFFERED"] == "1"
    assert "OMP_NUM_THREADS" not in launch.environ


def test_several_ranks_get_one_thread_each_unless_it_is_set(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("--nproc-per-node", "2", TRAIN).environ["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert run("--nproc-per-node", "2", TRAIN).environ["OMP_NUM_THREADS"] == "5"


def test_settings_come_from_file_set_and_flags(run: Run, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[checkpoint]\nevery_steps = 5\nkeep_last = 9\n")
    launch = run(
        "--config",
        "job.toml",
        "--set",
        "checkpoint.every_steps=6",
        "--set=heartbeat.min_limit_s=20",
        "--on-hang",
        "report",
        "--engine",
        "native",
        TRAIN,
    )
    assert launch.config.checkpoint.every_steps == 6
    assert launch.config.checkpoint.keep_last == 9
    assert launch.config.heartbeat.min_limit_s == 20.0
    assert launch.config.heartbeat.on_hang == "report"


def test_faults_come_from_settings_the_variable_and_flags(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPSTEP_FAULTS", "hang@2:0, exit@3:0")
    launch = run(
        "--fault", "kill@4:0", "--set", "faults.inject=spin@1:0", "--fault=stop@5:0", TRAIN
    )
    assert launch.config.faults.inject == (
        "spin@1:0",
        "hang@2:0",
        "exit@3:0",
        "kill@4:0",
        "stop@5:0",
    )


def test_a_run_folder_keeps_its_run_over_starts(run: Run, refuse: Refuse) -> None:
    first = run("--run-dir", "here", TRAIN)
    again = run("--run-dir", "here", TRAIN)
    assert again.run_id == first.run_id
    assert again.run_dir == first.run_dir
    said = refuse("--run-dir", "here", "--rdzv-id", "other", TRAIN)
    assert f"holds the run {first.run_id}, not other" in said


def test_a_program_is_handed_over_with_its_whole_path(run: Run) -> None:
    assert Path(run("--no-python", "true").target).is_absolute()


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nproc-per-nod", "2"], "no such flag --nproc-per-nod. Nothing was started. Did you m"),
        (["--nproc_per_nod", "2"], "Did you mean --nproc-per-node?"),
        (["--tee"], "no script was given"),
        (["--nnodes", "2"], "several nodes are not supported yet"),
        (["--nnodes", "1:4"], "several nodes are not supported yet"),
        (["--nnodes", "0"], "a run has at least 1 node"),
        (["--nnodes", "many"], "is neither a number nor MIN:MAX"),
        (["--node-rank", "1"], "several nodes are not supported yet"),
        (["--nnodes", "2", "--set", "engine.checkpoint=nvrx"], "NVRx's launcher takes several"),
        (["--node-rank", "x"], "is not a whole number"),
        (["--nproc-per-node", "0"], "--nproc-per-node 0 is not possible: a node has 1 to 1024"),
        (["--nproc-per-node", "-2"], "--nproc-per-node -2 is not possible"),
        (["--nproc-per-node", "two"], "is neither a whole number nor cpu, gpu or auto"),
        (["--nproc-per-node", "xpu"], "is neither a whole number nor cpu, gpu or auto"),
        (["--rdzv-backend", "etcd"], "is not a rendezvous that keepstep can use"),
        (["--rdzv-endpoint", "a:b"], "is not HOST:PORT"),
        (["--rdzv-endpoint", "::1"], "Write an IPv6 address in brackets"),
        (["--rdzv-endpoint", "localhost:99999"], "is not HOST:PORT"),
        (["--rdzv-endpoint", "localhost:1", "--master-port", "2"], "in different ways"),
        (["--rdzv-endpoint", "localhost", "--master-addr", "127.0.0.1"], "in different ways"),
        (["--rdzv-endpoint", "localhost:0", "--standalone"], "contradicts --standalone"),
        (["--rdzv-conf", "read_timeout=3"], "sets read_timeout to 3, which has no meaning here"),
        (["--rdzv-conf", "rank=1"], "sets rank to 1"),
        (["--rdzv-conf", "timeout"], "is not a list of KEY=VALUE"),
        (["--rdzv-conf", "timeout=x"], "gives x, which is not a number of seconds"),
        (["--rdzv-conf", "timeout=1,join_timeout=2"], "gives two limits for joining"),
        (["--rdzv-conf", "timeout=0"], "restart.join_limit_s is 0.0: it must be above 0"),
        (["--rdzv-id", "a/b"], "'a/b' cannot be a run id"),
        (["--rdzv-id", ".."], "'..' cannot be a run id"),
        (["--max-restarts", "-2"], "is out of range: -1"),
        (["--max-restarts", "x"], "is not a whole number"),
        (["--monitor-interval", "5"], "ten intervals must fit into the limit"),
        (["--shutdown-timeout", "0"], "run.grace_s is 0.0: it must be above 0"),
        (["--start-method", "forkserver"], "ranks are forked from keepstep's own server process"),
        (["--tee", "4"], "is neither a number from 0 to 3 nor a list of RANK:NUMBER"),
        (["--redirects", "1:3"], "names local rank 1, but there are 1"),
        (["--local-ranks-filter", "1"], "names local rank 1, but there are 1"),
        (["--local-ranks-filter", "a"], "is not a comma-separated list of local ranks"),
        (["--signals-to-handle", "SIGFOO"], "names SIGFOO, which is no signal here"),
        (["--signals-to-handle", "SIGKILL"], "names SIGKILL, which cannot be handled"),
        (["--signals-to-handle", ","], "names no signal"),
        (["--master-port", "70000"], "is out of range: 0 to 65535"),
        (["--master-addr", "192.0.2.1"], "192.0.2.1 is not an address of this machine"),
        (["--run-path"], "--run-path needs an absolute path, not train.py"),
        (["-m", "--no-python"], "--module and --no-python exclude each other"),
        (["--engine", "nvx"], "--engine: expected native or nvrx, not 'nvx' (did you mean nvrx?)"),
        (["--on-hang", "wait"], "--on-hang: expected restart or report, not 'wait'"),
        (["--config", "none.toml"], "none.toml: cannot be read (No such file or directory)"),
        (["--set", "checkpoint.every_step=1"], "(did you mean every_steps?)"),
        (["--fault", "kill@1"], "the fault 'kill@1' cannot be used"),
        (["--fault", "kill@1:1"], "rank 1 does not exist, the job has ranks 0 to 0"),
        (["--run-dir", "train.py/x"], "the folder"),
        (["--log-dir", "train.py"], "Choose another one with --log-dir"),
    ],
)
def test_bad_input_gets_one_clear_error(refuse: Refuse, arguments: list[str], said: str) -> None:
    assert said in refuse(*arguments, TRAIN)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no script was given"),
        (["--nproc-per-node", "2"], "no script was given"),
        (["none.py"], "none.py does not exist"),
        (["-m", "no_such_module_here"], "the module no_such_module_here is not found"),
        (["-m", TRAIN], "Leave -m out to run that file"),
        (["--no-python", "no-such-program-here"], "no-such-program-here is not found"),
        (["--no-python", "./train.py"], "is not executable"),
    ],
)
def test_a_target_that_is_not_there_is_named(
    refuse: Refuse, arguments: list[str], said: str
) -> None:
    assert said in refuse(*arguments)


def test_a_syntax_error_is_found_before_anything_starts(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import os\nif True print(1)\n")
    said = refuse("broken.py", code=78)
    assert "broken.py, line 2: if True print(1)" in said
    assert not (tmp_path / "runs").exists()


def test_problems_of_several_flags_are_told_together(refuse: Refuse) -> None:
    said = refuse("--nnodes", "2", "--nproc-per-node", "0", "--numa-binding", "node", TRAIN)
    assert "3 problems on the command line: " in said
    for part in ("--nnodes 2", "--nproc-per-node 0", "--numa-binding cannot be honoured"):
        assert part in said


def test_a_port_in_use_is_refused(refuse: Refuse) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refuse("--master-port", str(port), TRAIN)
    assert f"port {port} of 127.0.0.1 cannot be used: Address already in use" in said


def test_nothing_is_written_when_the_input_is_bad(refuse: Refuse, tmp_path: Path) -> None:
    refuse("--run-dir", "here", "--master-addr", "192.0.2.1", TRAIN)
    refuse("--run-dir", "here", "none.py")
    assert [path.name for path in tmp_path.iterdir()] == [TRAIN]
