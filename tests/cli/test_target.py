"""Scripts, modules and programs are found and compiled, and nothing of theirs is executed."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import sys
import zipfile
from pathlib import Path

import pytest

from keepstep.cli.target import check_target
from keepstep.errors import ScriptFailed, UsageError

EXPLODES = "raise SystemExit('executed while it was only checked')\n"
PATH = {"PATH": os.defpath}


def check(mode: str, target: str, folder: Path, **environ: str) -> str:
    return check_target(mode, target, PATH | environ, folder)  # type: ignore[arg-type]


def write(path: Path, text: str = EXPLODES) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_script_is_compiled_and_not_run(tmp_path: Path) -> None:
    write(tmp_path / "train.py")
    assert check("script", "train.py", tmp_path) == "train.py"
    assert check("script", str(tmp_path / "train.py"), tmp_path) == str(tmp_path / "train.py")


def test_a_folder_or_archive_with_main_is_a_script(tmp_path: Path) -> None:
    write(tmp_path / "job" / "__main__.py")
    check("script", "job", tmp_path)
    with zipfile.ZipFile(tmp_path / "job.pyz", "w") as archive:
        archive.writestr("__main__.py", "if\n")
    with pytest.raises(ScriptFailed, match=r"job\.pyz, line 1"):
        check("script", "job.pyz", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"empty/__main__\.py does not exist"):
        check("script", "empty", tmp_path)


def test_a_compiled_script_is_taken_as_it_is(tmp_path: Path) -> None:
    made = py_compile.compile(str(write(tmp_path / "train.py")), cfile=str(tmp_path / "t.pyc"))
    assert made is not None
    check("script", "t.pyc", tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = 1\ndef f(:\n", r"the script has a syntax error: invalid syntax \(.*line 2: def f\(:"),
        ("\tif a:\n b\n", "line 1"),
        ("a = '\0'\n", "cannot be compiled|syntax error"),
        ("# coding: no-such-coding\n", "no-such-coding"),
    ],
)
def test_a_script_that_python_cannot_compile_has_its_own_exit_code(
    tmp_path: Path, text: str, said: str
) -> None:
    write(tmp_path / "train.py", text)
    with pytest.raises(ScriptFailed, match=said) as caught:
        check("script", "train.py", tmp_path)
    assert caught.value.exit_code == 78


def test_a_warning_of_the_compiler_is_no_problem(tmp_path: Path) -> None:
    write(tmp_path / "train.py", "a = 1 is 1\n")
    check("script", "train.py", tmp_path)


def test_a_script_that_only_one_process_could_read_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(UsageError, match="not a file that every rank can read"):
        check("script", "pipe.py", tmp_path)


def test_another_python_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "train.py")
    check("script", "train.py", tmp_path, PYTHON_EXEC=sys.executable)
    with pytest.raises(UsageError, match="PYTHON_EXEC is /nowhere/python"):
        check("script", "train.py", tmp_path, PYTHON_EXEC="/nowhere/python")


def test_a_module_is_found_without_importing_its_packages(tmp_path: Path) -> None:
    write(tmp_path / "outer_package" / "__init__.py")
    write(tmp_path / "outer_package" / "inner" / "__init__.py")
    write(tmp_path / "outer_package" / "inner" / "train.py")
    check("module", "outer_package.inner.train", tmp_path)
    assert "outer_package" not in sys.modules


def test_a_module_may_lie_in_namespace_packages(tmp_path: Path) -> None:
    write(tmp_path / "outer_namespace" / "inner" / "train.py")
    check("module", "outer_namespace.inner.train", tmp_path)


def test_a_package_needs_a_main_module(tmp_path: Path) -> None:
    write(tmp_path / "package_a" / "__init__.py", "")
    with pytest.raises(UsageError, match="is not found, or is a package without __main__"):
        check("module", "package_a", tmp_path)
    write(tmp_path / "package_a" / "__main__.py")
    check("module", "package_a", tmp_path)


def test_a_module_of_the_installation_is_found(tmp_path: Path) -> None:
    check("module", "json.tool", tmp_path)


def test_a_package_that_makes_its_own_search_path_is_asked_in_another_process(
    tmp_path: Path,
) -> None:
    text = "import os\n__path__.append(os.path.join(__path__[0], os.pardir, 'elsewhere'))\n"
    write(tmp_path / "package_b" / "__init__.py", text)
    write(tmp_path / "elsewhere" / "train.py")
    check("module", "package_b.train", tmp_path)
    assert "package_b" not in sys.modules
    with pytest.raises(UsageError, match=r"the module package_b\.other is not found"):
        check("module", "package_b.other", tmp_path)


def test_a_module_with_a_syntax_error_is_found_out(tmp_path: Path) -> None:
    write(tmp_path / "module_c.py", "if\n")
    with pytest.raises(ScriptFailed, match=r"module_c\.py, line 1: if"):
        check("module", "module_c", tmp_path)


@pytest.mark.parametrize("name", ["no_such_module_d", "json.no_such", ".x", "a..b", "", "a/b"])
def test_a_module_that_is_not_there_is_a_usage_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is not found"):
        check("module", name, tmp_path)
    assert importlib.util.find_spec("no_such_module_d") is None


def test_a_program_is_looked_up_in_the_path_or_the_folder(tmp_path: Path) -> None:
    program = write(tmp_path / "bin" / "job", "#!/bin/sh\n")
    with pytest.raises(UsageError, match="not executable"):
        check("program", "./bin/job", tmp_path)
    program.chmod(0o755)
    assert Path(check("program", "./bin/job", tmp_path)) == program
    assert check("program", "job", tmp_path, PATH=str(program.parent)) == str(program)
    with pytest.raises(UsageError, match="looked for in PATH"):
        check("program", "job", tmp_path)
