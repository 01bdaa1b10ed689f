"""The command ``keepstep``: its commands, its help, and how errors leave it."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from keepstep.cli.flags import FLAGS
from keepstep.cli.main import COMMANDS, main
from keepstep.errors import RestartsExhausted


@pytest.fixture
def broken_run(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for the agent, whose ``launch`` the test sets."""
    agent = types.ModuleType("keepstep.agent.launch")
    monkeypatch.setitem(sys.modules, "keepstep.agent.launch", agent)
    return agent


def raising(error: BaseException) -> object:
    def launch(spec: object) -> int:
        raise error

    return launch


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in COMMANDS)


def test_without_a_command_help_is_shown_and_the_exit_code_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 64
    assert "Usage: keepstep" in capsys.readouterr().out


def test_run_help_shows_honoured_flags_and_no_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["run", "--help"]) == 0
    said = capsys.readouterr().out
    for flag in FLAGS:
        assert (f"--{flag.name} " in said) == (not flag.refused), flag.name


@pytest.mark.parametrize("command", [["checkpoint", "ls"], ["checkpoint", "verify"], ["report"]])
def test_the_other_commands_are_there(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--help"]) == 0
    assert "RUN" in capsys.readouterr().out


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runn", "train.py"]) == 64
    said = capsys.readouterr().err
    assert said.startswith("keepstep: error: No such command 'runn'")
    assert "run" in said.partition("'runn'")[2]


@pytest.mark.parametrize("arguments", [["--version"], ["version"], ["--version", "run"]])
def test_the_version_is_one_line_first(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("keepstep ")


def test_version_tells_what_else_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    said = capsys.readouterr().out
    assert f"Python {sys.version_info.major}.{sys.version_info.minor}" in said
    assert "msgspec " in said


def test_an_error_on_purpose_is_one_message_with_its_exit_code(
    broken_run: types.ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: object,
) -> None:
    monkeypatch.chdir(str(tmp_path))
    error = RestartsExhausted("5 restarts without a new step", advice="See the logs")
    broken_run.launch = raising(error)  # type: ignore[attr-defined]
    assert main(["run", "--no-python", "true"]) == 76
    said = capsys.readouterr().err
    assert said == "keepstep: error: 5 restarts without a new step. See the logs.\n"


def test_an_error_of_ours_shows_where_and_asks_for_a_report(
    broken_run: types.ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: object,
) -> None:
    monkeypatch.chdir(str(tmp_path))
    broken_run.launch = raising(KeyError("round"))  # type: ignore[attr-defined]
    assert main(["run", "--no-python", "true"]) == 70
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "KeyError: 'round'" in said
    assert "this is a bug of keepstep, not of your script. Please report it" in said


def test_an_interrupt_ends_with_the_shells_code(
    broken_run: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.chdir(str(tmp_path))
    broken_run.launch = raising(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert main(["run", "--no-python", "true"]) == 130


def loaded_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after ``code``."""
    tail = "\nimport sys; sys.stderr.write(' '.join({n.partition('.')[0] for n in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code + tail],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    return set(done.stderr.split())


def test_no_command_imports_torch() -> None:
    calls = "; ".join(
        f"main({arguments!r})" for arguments in (["--help"], ["run", "--help"], ["version"])
    )
    loaded = loaded_after(f"from keepstep.cli.main import main; {calls}")
    assert "torch" not in loaded
    assert "typer" in loaded


def test_the_version_needs_no_parser() -> None:
    loaded = loaded_after("from keepstep.cli.main import main; main(['--version'])")
    assert not loaded & {"torch", "typer", "rich", "msgspec"}
