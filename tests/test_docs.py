"""What the documents say is so: commands, flags, settings, tables, diffs and the list of files."""

from __future__ import annotations

import ast
import configparser
import difflib
import os
import re
import shlex
import sys
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

import keepstep
from keepstep import events
from keepstep.agent.launch_spec import Launch
from keepstep.agent.nvrx_requirements import Installed
from keepstep.api.job import Job
from keepstep.cli import checkpoint as checkpoint_commands
from keepstep.cli import run as run_command
from keepstep.cli.flags import BY_NAME
from keepstep.cli.main import COMMANDS, main
from keepstep.config import Config, EngineSettings, env
from keepstep.errors import ExitCode
from keepstep.faults import plan
from keepstep.policy import ladder
from keepstep.policy.differences import differences
from tools import budget

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "keepstep"
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
DECISIONS = ROOT / "docs" / "decisions"
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "docs/log.md")),
    *sorted(DECISIONS.glob("*.md")),
]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LAUNCHED = 7

CHECKPOINT_COMMANDS = [str(one.name) for one in checkpoint_commands.app.registered_commands]


def blocks(text: str, language: str) -> list[str]:
    """Code blocks of a Markdown text, without their fences."""
    return [body for name, body in _BLOCK.findall(text) if name == language]


def inline(text: str) -> list[str]:
    """What stands in backticks outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", _BLOCK.sub("", text))


def section(text: str, heading: str) -> str:
    """The text below a second-level heading."""
    return text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def rows(text: str) -> list[list[str]]:
    """Cells of all table rows but heads and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = {number for number, row in enumerate(split) if set("".join(row)) <= set("- ")}
    heads = {number - 1 for number in rules}
    return [row for number, row in enumerate(split) if number not in rules | heads]


def sides(diff: str) -> tuple[str, str]:
    """Both versions of a piece of code that a diff shows whole."""
    lines = diff.splitlines()
    old = [line[1:] for line in lines if not line.startswith("+")]
    new = [line[1:] for line in lines if not line.startswith("-")]
    return "\n".join(old), "\n".join(new)


def commands(word: str) -> list[list[str]]:
    """Arguments of the commands in README's code that begin with ``word``."""
    lines = [line for _, body in _BLOCK.findall(README) for line in body.splitlines()]
    bare = [line.removeprefix("+") for line in lines]
    return [shlex.split(line, comments=True)[1:] for line in bare if line.startswith(f"{word} ")]


def own_flags(script: Path) -> set[str]:
    """Flags that a script with argparse takes."""
    return set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', script.read_text(encoding="utf-8")))


def settings() -> dict[str, object]:
    """Every setting with its default."""
    found: dict[str, object] = {}
    config = Config()
    for part in fields(config):
        values = getattr(config, part.name)
        found |= {f"{part.name}.{f.name}": getattr(values, f.name) for f in fields(values)}
    return found


@cache
def source() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py")))


@pytest.fixture
def help_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[str]], str]:
    """The help that a command prints."""
    monkeypatch.setenv("COLUMNS", "200")

    def ask(words: list[str]) -> str:
        capsys.readouterr()
        assert main([*words, "--help"]) == 0, words
        return capsys.readouterr().out

    return ask


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Launch]]:
    """Launches handed to a stand-in for the agent; the working folder has the examples."""
    for name in env.snapshot():
        if name.startswith(("PET_", "KEEPSTEP_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    seen: list[Launch] = []
    agent = types.ModuleType("keepstep.agent.launch")

    def launch(spec: Launch) -> int:
        seen.append(spec)
        return _LAUNCHED

    agent.launch = launch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "keepstep.agent.launch", agent)
    # What a command means does not depend on what is installed here.
    found = Installed(nvrx="0.4.1", torch="2.13.0", nccl="", numpy="2.0.0")
    monkeypatch.setattr(run_command, "installed", lambda: found)
    yield seen


# --- commands and flags ---------------------------------------------------------------------------


def test_every_run_command_in_readme_is_accepted(launched: list[Launch]) -> None:
    shown = [words for words in commands("keepstep") if words[0] == "run"]
    assert len(shown) >= 2
    for words in shown:
        assert main(words) == _LAUNCHED, words
        launch = launched.pop()
        used = {word for word in launch.args if word.startswith("--")}
        assert used <= own_flags(launched_script(launch)), words


def launched_script(launch: Launch) -> Path:
    return EXAMPLES / Path(launch.target).name


def test_every_other_command_in_readme_exists_with_its_flags(
    help_of: Callable[[list[str]], str],
) -> None:
    shown = [words for words in commands("keepstep") if words[0] != "run"]
    assert shown
    for words in shown:
        depth = 2 if words[0] == "checkpoint" else 1
        text = help_of(words[:depth])
        assert [word for word in words if word.startswith("-") and word not in text] == []


def test_the_table_of_commands_names_all_of_them_with_their_flags(
    help_of: Callable[[list[str]], str],
) -> None:
    listed = []
    for command, meaning in (row[:2] for row in rows(section(README, "Commands"))[:9]):
        words = [word for word in command.split("`")[1].split()[1:] if word.islower()]
        words = [word for word in words if re.fullmatch(r"[a-z]+", word)]
        listed.append(words)
        text = help_of(words)
        assert [flag for flag in re.findall(r"`(--[\w-]+)", meaning) if flag not in text] == []
        listed += [["checkpoint", word] for word in re.findall(r", `(\w+)`", command)]
    assert {words[0] for words in listed} == set(COMMANDS)
    assert {words[1] for words in listed if len(words) > 1} == set(CHECKPOINT_COMMANDS)


def test_every_flag_that_a_page_names_exists(help_of: Callable[[list[str]], str]) -> None:
    known = {f"--{name}" for name, flag in BY_NAME.items() if not flag.refused}
    known |= own_flags(EXAMPLES / "train_fsdp.py")
    others = [["report"], *(["checkpoint", name] for name in CHECKPOINT_COMMANDS)]
    known |= {flag for words in others for flag in re.findall(r"--[\w-]+", help_of(words))}
    for page in PAGES:
        named = {
            flag
            for code in inline(page.read_text(encoding="utf-8"))
            for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code)
        }
        assert named - known == set(), page.name


def test_scripts_that_a_page_names_can_be_run() -> None:
    named = {
        name for page in PAGES for name in re.findall(r"\bscripts/\w+", page.read_text("utf-8"))
    }
    assert named >= {"scripts/demo", "scripts/test", "scripts/check"}
    for name in named:
        assert os.access(ROOT / name, os.X_OK), name


# --- names and numbers ----------------------------------------------------------------------------


def test_settings_and_events_that_a_page_names_exist() -> None:
    sections = "|".join(part.name for part in fields(Config))
    known = set(settings()) | set(events.KINDS)
    for page in PAGES:
        codes = inline(page.read_text(encoding="utf-8"))
        named = {code for code in codes if re.fullmatch(rf"(?:{sections})\.[a-z_]+", code)}
        assert named - known == set(), page.name
    assert "checkpoint.every_steps" in inline(README)


def test_settings_that_the_pages_about_nvrx_name_exist() -> None:
    sections = "|".join(part.name for part in fields(Config))
    for name in ("nvrx.md", "comparison.md"):
        codes = inline((ROOT / "docs" / name).read_text(encoding="utf-8"))
        found = {code.partition(" = ")[0] for code in codes}
        named = {one for one in found if re.fullmatch(rf"(?:{sections})\.[a-z_]+", one)}
        assert named - set(settings()) - set(events.KINDS) == set(), name
        assert named, name


def test_the_section_on_engines_names_every_part_and_every_difference() -> None:
    text = section(README, "Engines")
    parts = [name for name in settings() if name.startswith("engine.")]
    assert [name for name in parts if f"`{name} = " not in text] == []
    chosen = [EngineSettings(name="nvrx"), EngineSettings(launcher="nvrx")]
    clauses = {one.clause for engine in chosen for one in differences(engine.parts)}
    assert set(re.findall(r"^- `([a-z-]+)`", text, re.MULTILINE)) == clauses


def test_the_table_of_settings_shows_the_defaults() -> None:
    known = settings()
    shown = rows(section(README, "Settings"))
    assert len(shown) > 10
    for name, default, _ in shown:
        value = known[name.strip("`")]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        assert default == (text or "empty"), name


def test_the_tables_of_faults_levels_and_exit_codes_are_complete() -> None:
    kinds = [row[0].strip("`") for row in rows(section(README, "Faults"))]
    assert sorted(kinds) == sorted(plan.KINDS)
    levels = [row[0].strip("`") for row in rows(section(README, "Recovery levels"))]
    assert levels == list(typing.get_args(ladder.Level))
    codes = [int(row[0]) for row in rows(section(README, "Exit codes"))]
    assert codes == sorted(int(code) for code in ExitCode)
    assert {kind for kind in plan.KINDS if f"`{kind}`" in section_of_changes()} == set(plan.KINDS)


def section_of_changes() -> str:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return section(text, f"{keepstep.__version__}, unreleased")


def test_names_of_the_api_that_a_page_uses_exist() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        code = "\n".join([*inline(text), *blocks(text, "diff"), *blocks(text, "python")])
        assert set(re.findall(r"\bkeepstep\.([A-Za-z_]\w*)", code)) <= set(keepstep.__all__)
        for name in set(re.findall(r"\bjob\.([a-z_]\w*)", code)) - {"py"}:
            assert hasattr(Job, name), f"{page.name}: job.{name}"


def test_files_and_classes_that_a_page_names_exist() -> None:
    for page in PAGES:
        for code in inline(page.read_text(encoding="utf-8")):
            if re.fullmatch(r"[\w.-]+(?:/[\w.-]+)*\.(?:py|md|toml|txt)", code):
                assert (PACKAGE / code).exists() or (ROOT / code).exists(), f"{page.name}: {code}"
            elif re.fullmatch(r"(?:[A-Z][a-z]+)+", code):
                assert re.search(rf"\b{code}\b", source()), f"{page.name}: {code}"


# --- diffs ----------------------------------------------------------------------------------------


def test_the_diff_of_the_examples_is_the_real_one() -> None:
    names = ("train_plain.py", "train_fsdp.py")
    old, new = ((EXAMPLES / name).read_text(encoding="utf-8").splitlines() for name in names)
    real = "\n".join(difflib.unified_diff(old, new, *names, n=0, lineterm="")) + "\n"
    assert [block for block in blocks(README, "diff") if block.startswith("---")] == [real]


def test_both_sides_of_the_other_diffs_are_python() -> None:
    shown = [block for block in blocks(README, "diff") if not block.startswith("---")]
    code = [block for block in shown if "\n+keepstep run" not in block]
    assert (len(shown), len(code)) == (4, 3)
    for block in code:
        for side in sides(block):
            ast.parse(side)


# --- the list of files, layers, decisions ---------------------------------------------------------


def test_architecture_lists_every_file_of_the_package_once() -> None:
    listed = [row[0].strip("`") for row in rows(section(ARCHITECTURE, "Files"))]
    files = [name for name in listed if not name.startswith("**")]
    assert sorted(files) == sorted(
        path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")
    )


def test_architecture_shows_the_layers_that_are_enforced() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    lines = parser["importlinter:contract:layers"]["layers"].split("\n")
    enforced = [re.findall(r"\w+", line) for line in lines]
    present = [
        [name for name in line if (PACKAGE / name).exists() or (PACKAGE / f"{name}.py").exists()]
        for line in enforced
    ]
    (block,) = blocks(section(ARCHITECTURE, "Layers"), "")
    shown = [re.findall(r"\w+", re.split(r"\s{2,}", line)[0]) for line in block.splitlines()]
    assert shown == [line for line in present if line]


def test_decisions_are_numbered_without_gaps_and_listed_with_their_titles() -> None:
    pages = sorted(path for path in DECISIONS.glob("*.md") if path.name != "README.md")
    titles = {}
    for number, path in enumerate(pages, 1):
        text = path.read_text(encoding="utf-8")
        match = re.match(rf"# ({number:04d}) (.+)\n", text)
        assert match and path.name.startswith(f"{number:04d}-"), path.name
        titles[path.name] = match[2]
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [
            "Context",
            "Decision",
            "Why",
            "Consequences",
        ]
    texts = [path.read_text(encoding="utf-8") for path in pages]
    assert any(f"{budget.PACKAGE_LINES:,}" in text for text in texts), "the budget has no page"
    index = (DECISIONS / "README.md").read_text(encoding="utf-8")
    assert {name: title for title, name in re.findall(r"\[(.+?)\]\((.+?)\)", index)} == titles
