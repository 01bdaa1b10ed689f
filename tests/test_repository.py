"""What holds for the repository as a whole."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "keepstep"
# Packages and modules that may bring torch into a process (ARCHITECTURE.md, layers).
WITH_TORCH = re.compile(r"keepstep\.(rank|engines|api|integrations|testing)\b|.*\.torch_\w+$")


def modules() -> list[str]:
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def tracked(*patterns: str) -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is not a git checkout, so there are no tracked files to look at")
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    paths = [ROOT / os.fsdecode(name) for name in listing.stdout.split(b"\0") if name]
    return [path for path in paths if path.is_file()]


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_keepstep_does_not_import_torch() -> None:
    assert run_python("import sys, keepstep; print('torch' in sys.modules)") == "False"


def test_only_the_layers_of_the_training_process_import_torch() -> None:
    names = [name for name in modules() if not WITH_TORCH.match(name)]
    assert "keepstep.agent" in names
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(name + ' imports torch')\n"
    )
    run_python(code)


def test_nvrx_is_named_only_where_it_is_imported_and_where_its_launcher_is_started() -> None:
    # An import by name, as library.py has it, is not seen by import-linter.
    package = "nvidia_" + "resiliency_ext"
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        names = [
            name.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for name in node.names
        ]
        names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names += [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in prose
        ]
        if any(package in name for name in names):
            found.append(path.relative_to(PACKAGE).as_posix())
    assert found == ["agent/ft_command.py", "engines/nvrx/library.py"]


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_every_module_says_what_it_is(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert text, f"{path.relative_to(ROOT)} has no docstring"


def test_no_tracked_file_names_a_machine_path_or_a_registry_host() -> None:
    # Put together from parts, so that this file does not match itself.
    folders = "|".join(["work", "farm", "tmp" + "/ks"])
    hosts = "|".join(
        re.escape(".".join(parts))
        for parts in [
            ("pypi", "org"),
            ("pythonhosted", "org"),
            ("download", "pytorch", "org"),
            ("npmjs", "org"),
            ("deb", "debian", "org"),
        ]
    )
    forbidden = re.compile(rf"(?<![\w.~$}}/-])/(?:{folders})/|{hosts}")
    found = []
    for path in tracked():
        text = path.read_bytes().decode("utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            if match := forbidden.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match.group()}")
    assert found == []


def headings(text: str) -> set[str]:
    """Anchors of a Markdown text's headings, as code hosts make them."""
    anchors: set[str] = set()
    for line in prose(text).splitlines():
        if match := re.match(r"#+\s+(.*)", line):
            words = re.sub(r"[^\w\- ]", "", match.group(1).strip().lower())
            anchors.add(words.replace(" ", "-"))
    return anchors


def prose(text: str) -> str:
    """A Markdown text without its code."""
    without_blocks = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", without_blocks)


def test_links_between_documents_resolve() -> None:
    broken = []
    for page in tracked("*.md"):
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", prose(text)):
            if re.match(r"[a-z][a-z0-9+.-]*:", target):
                continue
            name, _, anchor = target.partition("#")
            place = (page.parent / name) if name else page
            if not place.exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}: no such file")
            elif anchor and anchor not in headings(place.read_text(encoding="utf-8")):
                broken.append(f"{page.relative_to(ROOT)}: {target}: no such heading")
    assert broken == []


def test_the_package_is_marked_as_typed_and_torch_is_only_an_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["src/keepstep"]
    assert (PACKAGE / "py.typed").is_file()
    assert not [name for name in project["project"]["dependencies"] if name.startswith("torch")]
    assert project["project"]["optional-dependencies"]["torch"] == ["torch>=2.13"]


def test_every_pinned_package_has_a_hash_and_torch_is_not_pinned() -> None:
    text = (ROOT / "constraints" / "ci.txt").read_text(encoding="utf-8")
    entries = re.findall(r"^([\w.-]+)==(?:.*\\\n)((?:    --hash=.*\n)*)", text, flags=re.MULTILINE)
    assert len(entries) > 20
    assert [name for name, hashes in entries if not hashes] == []
    assert "torch" not in {name for name, _ in entries}


@pytest.mark.full
@pytest.mark.slow
def test_wheel_and_source_archive_hold_what_a_user_needs(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert "keepstep/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("licenses/NOTICE") for name in names)
    assert len(list(tmp_path.glob("*.tar.gz"))) == 1
