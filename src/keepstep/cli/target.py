"""Whether the script, module or program can be run at all, found out before anything starts.

Nothing of the user's is executed here: files are compiled, packages are looked up on disk.
"""

from __future__ import annotations

import errno
import importlib
import importlib.machinery
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from keepstep.cli.launch_plan import Mode
from keepstep.cli.reader import NOTHING_STARTED
from keepstep.errors import ScriptFailed, UsageError

_LOOKUP_LIMIT_S = 300


def check_target(mode: Mode, target: str, environ: Mapping[str, str], folder: Path) -> str:
    """The target as the ranks' processes shall be given it.

    Args:
        mode: What ``target`` is.
        target: As on the command line.
        environ: For PATH.
        folder: The working folder; relative paths start here.

    Returns:
        ``target``; for a program its absolute path.

    Raises:
        UsageError: it cannot be found or read.
        ScriptFailed: Python cannot compile it.
    """
    if mode == "program":
        return _program(target, environ, folder)
    chosen = environ.get("PYTHON_EXEC", "")
    found = shutil.which(chosen, path=environ.get("PATH")) if chosen else sys.executable
    if found is None or Path(found).parent != Path(sys.executable).parent:
        raise UsageError(
            f"PYTHON_EXEC is {chosen}, but ranks run in keepstep's own Python, {sys.executable}",
            done=NOTHING_STARTED,
            advice="Install keepstep for that Python and run it with that, or unset PYTHON_EXEC",
        )
    if mode == "module":
        _module(target, folder)
    else:
        _script(folder / target)
    return target


def _program(target: str, environ: Mapping[str, str], folder: Path) -> str:
    name = str(folder / target) if os.sep in target else target
    found = shutil.which(name, path=environ.get("PATH"))
    if found is None:
        exists = os.sep in target and Path(name).is_file()
        raise UsageError(
            f"the program {target} {'is not executable' if exists else 'is not found'}",
            where="" if exists or os.sep in target else "looked for in PATH",
            done=NOTHING_STARTED,
            advice="Make it executable with chmod +x, or leave --no-python out if it is a Python "
            "script"
            if exists
            else "Check its name, or leave --no-python out for a Python script",
        )
    return str(folder / found)


def _script(path: Path) -> None:
    inner = path / "__main__.py" if path.is_dir() else path
    try:
        if not stat.S_ISREG(inner.stat().st_mode):
            raise OSError(errno.EINVAL, "it is not a file that every rank can read")
        if zipfile.is_zipfile(inner):
            with zipfile.ZipFile(inner) as archive:
                source = archive.read("__main__.py")
        else:
            source = inner.read_bytes()
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        said = "does not exist" if missing else f"cannot be read: {_reason(error)}"
        raise UsageError(
            f"the script {inner} {said}",
            done=NOTHING_STARTED,
            advice="Check the path; flags of keepstep come before the script, -m runs a module, "
            "--no-python runs a program",
        ) from error
    if not source.startswith(importlib.util.MAGIC_NUMBER):
        _compile(source, inner)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _compile(source: bytes, path: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks show them, once each
            compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        text = f": {error.text.strip()}" if error.text else ""
        raise ScriptFailed(
            f"the script has a syntax error: {error.msg}",
            where=f"{path}, line {error.lineno}{text}",
            done=NOTHING_STARTED,
            advice="Correct the script",
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ScriptFailed(
            f"the script cannot be compiled: {error}",
            where=str(path),
            done=NOTHING_STARTED,
            advice="Correct the script",
        ) from error


# --- modules --------------------------------------------------------------------------------------


def _module(name: str, folder: Path) -> None:
    importlib.invalidate_caches()
    spec = None
    if all(part.isidentifier() for part in name.split(".")):
        spec = _find(name, folder)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _below("__main__", spec.submodule_search_locations)
        if spec is None and _another_python_finds(name, folder):
            return  # its package makes its own search path when it is imported
    if spec is None:
        is_file = (folder / name).is_file()
        raise UsageError(
            f"the module {name} is not found, or is a package without __main__",
            done=NOTHING_STARTED,
            advice="Leave -m out to run that file"
            if is_file
            else "Check its name and PYTHONPATH; it is looked for in the working folder first",
        )
    if spec.origin and spec.origin.endswith(".py") and Path(spec.origin).is_file():
        _compile(Path(spec.origin).read_bytes(), Path(spec.origin))


def _find(name: str, folder: Path) -> importlib.machinery.ModuleSpec | None:
    """Find a module without importing its parents."""
    top, *rest = name.split(".")
    spec = _below(top, [str(folder)])
    if spec is None:
        try:
            spec = importlib.util.find_spec(top)
        except ValueError:  # a module of this process that has no spec, as __main__
            return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = _below(part, spec.submodule_search_locations)
    return spec


def _below(part: str, locations: Sequence[str]) -> importlib.machinery.ModuleSpec | None:
    # The last part of the name only: finders use no more of it, and a namespace package found by
    # its whole name would look for its parent among the imported modules.
    return importlib.machinery.PathFinder.find_spec(part, list(locations))


_LOOKUP = """
import sys
from importlib.util import find_spec
spec = find_spec(sys.argv[1])
if spec is not None and spec.submodule_search_locations is not None:
    spec = find_spec(sys.argv[1] + ".__main__")
sys.exit(spec is None)
"""


def _another_python_finds(name: str, folder: Path) -> bool:
    """Whether a fresh interpreter, which may import the parents, finds what ``-m name`` runs."""
    if "." not in name:
        return False
    asked = [sys.executable, "-c", _LOOKUP, name]
    try:
        done = subprocess.run(asked, cwd=folder, capture_output=True, timeout=_LOOKUP_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
