"""Gives a hostile checkpoint to everything that reads one, in a process with little memory."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

import keepstep
from keepstep.cli.main import main
from keepstep.errors import KeepstepError
from tests.crash import hostile

PRELOAD = "tests.crash.attacks"
_FORMS = ("safetensors", "torch", "dcp")
"""What is exported to is of no account to what is read: each attack takes one of them."""
_ROOM = 512 << 20
"""Bytes of address space beyond what the process has when it begins."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one reader took it: exit code, and what it said. ``equal``: it restored what was saved"""

    reader: str
    code: int
    text: str
    equal: bool = False


def preload() -> None:
    """Imports that happen at first use."""
    _command("checkpoint", "ls", ".")


def attack(root: str, target: str, answers: str) -> int:
    """Give ``root`` to all readers; runs in a fork.

    Args:
        root: Folder of checkpoints.
        target: Folder for what exports and imports write.
        answers: File for the outcomes.
    """
    _limit_memory()
    found = [_restore(lambda one: one.restore, Path(root))]
    for words in (["ls"], ["ls", "--json"], ["verify"], ["verify", "--quick"], ["inspect"]):
        found.append(_command("checkpoint", words[0], root, *words[1:]))
    form = _FORMS[len(answers) % len(_FORMS)]
    found.append(_command("checkpoint", "export", root, f"{target}/{form}", "--to", form))
    Path(answers).write_bytes(msgspec.json.encode(found))
    return 0


def attack_by_dcp(root: str, target: str, answers: str) -> int:
    """Give the folder ``dcp`` in ``root`` to all that reads such folders; runs in a fork."""
    _limit_memory()
    source = f"{root}/dcp"
    found = [
        _command("checkpoint", "import", source, f"{target}/run", "--step", "3"),
        _restore(lambda one: one.restore, Path(target) / "fresh", resume_from=source),
    ]
    Path(answers).write_bytes(msgspec.json.encode(found))
    return 0


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + _ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _restore(call: Callable[[Any], Any], root: Path, **settings: Any) -> Outcome:
    state: dict[str, Any] = hostile.state(0.0)
    warnings.simplefilter("ignore")
    try:
        with keepstep.Checkpointer(root, **settings) as checkpointer:
            step = call(checkpointer)(state)
    except KeepstepError as error:
        parts = (error.what, error.where, error.done, error.advice)
        text = str(error) if all(parts) else f"a part is missing: {parts}"
        return Outcome(reader="restore", code=int(error.exit_code), text=text)
    except BaseException:  # noqa: BLE001 - whatever it is, it is told to the test
        return Outcome(reader="restore", code=-1, text=traceback.format_exc())
    equal = (state["model"].weight == 1).all() and (state["data"]["own"] == 1).all()
    equal = bool(equal) and state["data"]["seen"] == 1
    return Outcome(reader="restore", code=0, text=f"step {step}", equal=equal)


def _command(*words: str) -> Outcome:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = main(list(words))
        except BaseException:  # noqa: BLE001 - whatever it is, it is told to the test
            return Outcome(reader=" ".join(words[1:2]), code=-1, text=traceback.format_exc())
    return Outcome(reader=words[1], code=int(code), text=output.getvalue())


def read(path: Path) -> Sequence[Outcome]:
    """The outcomes that an attack has written."""
    return msgspec.json.decode(path.read_bytes(), type=list[Outcome])
