"""Every sentence with which keepstep refuses something, read from its source.

``messages.txt`` beside this file holds them, so that a change of words is seen in review. After
such a change, write it anew:

    python -m tests.golden.messages --write

A value that is only known at run time stands as ``<expression>``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import keepstep
from keepstep import errors
from keepstep.errors import KeepstepError

GOLDEN = Path(__file__).with_name("messages.txt")
SOURCE = Path(keepstep.__file__).parent
PARTS = ("where", "done", "advice")
CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, KeepstepError)
}


Texts = Mapping[str, str]
Function = ast.FunctionDef


def text_of(node: ast.expr, known: Texts) -> str:
    """The text that ``node`` stands for, as far as the source and ``known`` names say it."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(text_of(value, known) for value in values)
        case ast.FormattedValue(value=value):
            return text_of(value, known)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return text_of(left, known) + text_of(right, known)
        case ast.Name(id=name) if name in known:
            return known[name]
        case _:
            return f"<{ast.unparse(node)}>"


def called_name(node: ast.Call) -> str:
    """The last part of what is called."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def error_of(node: ast.Call, known: Texts) -> KeepstepError:
    """The error that a call of its class makes."""
    parts = {k.arg: text_of(k.value, known) for k in node.keywords if k.arg in PARTS}
    made = CLASSES[called_name(node)](text_of(node.args[0], known))
    for name, text in parts.items():
        setattr(made, str(name), text)
    return made


def makers(tree: ast.Module) -> dict[str, tuple[list[str], ast.Call]]:
    """Functions of a module that only put a given text into an error: parameters, and that call."""
    found: dict[str, tuple[list[str], ast.Call]] = {}
    for function in tree.body:
        if isinstance(function, Function) and isinstance(function.body[-1], ast.Return | ast.Raise):
            last = function.body[-1]
            made = last.value if isinstance(last, ast.Return) else last.exc
            names = [argument.arg for argument in function.args.args]
            if isinstance(made, ast.Call) and called_name(made) in CLASSES and made.args:
                used = {n.id for n in ast.walk(made.args[0]) if isinstance(n, ast.Name)}
                if used & set(names):
                    found[function.name] = (names, made)
    return found


class _Finder(ast.NodeVisitor):
    """Collects (qualified name, error) of every error that a module makes."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[str, KeepstepError]] = []
        self._names: list[str] = []
        self._makers = makers(tree)
        self.visit(tree)

    def _inside(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name not in self._makers:
            self._inside(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node)

    def visit_Call(self, node: ast.Call) -> None:
        name, place = called_name(node), ".".join(self._names)
        if name in CLASSES and node.args:
            self.found.append((place, error_of(node, {})))
        elif name in self._makers and isinstance(node.func, ast.Name):
            names, made = self._makers[name]
            given = dict(zip(names, node.args, strict=False))
            given |= {k.arg: k.value for k in node.keywords if k.arg}
            known = {parameter: text_of(value, {}) for parameter, value in given.items()}
            self.found.append((place, error_of(made, known)))
        self.generic_visit(node)


def raised() -> Iterator[tuple[str, KeepstepError]]:
    """Place and error of everything that the package raises, by module and line."""
    for path in sorted(SOURCE.rglob("*.py")):
        finder = _Finder(ast.parse(path.read_text(encoding="utf-8")))
        module = path.relative_to(SOURCE).with_suffix("").as_posix()
        for name, error in finder.found:
            yield f"{module}:{name}", error


def sample(kind: type[KeepstepError]) -> KeepstepError:
    """An error with all four parts."""
    return kind(
        "3 of 8 shards are damaged",
        where="rank 3, step 500",
        done="Nothing was loaded",
        advice="Use an older checkpoint",
    )


def render() -> str:
    """What the golden file must hold."""
    lines = ["# Classes, exit codes, and the four parts in order.", ""]
    for name, kind in CLASSES.items():
        lines += [f"{name} ({int(kind.exit_code)}): {sample(kind)}"]
    lines += ["", "# Every error that the package raises. <...> is filled in at run time."]
    for place, error in raised():
        lines += ["", f"{place} {type(error).__name__}", f"    {error}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python -m tests.golden.messages --write")
    GOLDEN.write_text(render(), encoding="utf-8")
