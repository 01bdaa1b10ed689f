"""Size budget: files, functions, Protocols and the package stay small enough to be read.

Code lines are counted: blank lines, comments and docstrings are free. ``scripts/check`` runs it.
Raising a number here is a decision with a reason, written down in ``docs/decisions/``.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

FILE_LINES = 400
FUNCTION_LINES = 60
PROTOCOL_METHODS = 4
PACKAGE_LINES = 28_000

_FREE = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)


def code_lines(source: str, tree: ast.Module) -> set[int]:
    """Numbers of the lines that hold code.

    Raises:
        tokenize.TokenError, IndentationError: ``source`` is not Python.
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _FREE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        # A string that stands alone is documentation, below a setting as well as below a def.
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def is_protocol(node: ast.ClassDef) -> bool:
    """Whether a class names ``Protocol`` as its base."""
    for base in node.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        if getattr(name, "id", getattr(name, "attr", "")) == "Protocol":
            return True
    return False


def problems_of(path: Path, source: str) -> tuple[int, list[str]]:
    """Code lines of one file, and one sentence for each limit that it breaks.

    Raises:
        SyntaxError: ``source`` is not Python.
    """
    tree = ast.parse(source, filename=str(path))
    lines = code_lines(source, tree)
    found: list[str] = []
    if len(lines) > FILE_LINES:
        found.append(f"{path}: {len(lines)} code lines, at most {FILE_LINES}")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            span = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            size = sum(line in lines for line in span)
            if size > FUNCTION_LINES:
                found.append(
                    f"{path}:{node.lineno}: {node.name} has {size} code lines, "
                    f"at most {FUNCTION_LINES}"
                )
        elif isinstance(node, ast.ClassDef) and is_protocol(node):
            size = sum(
                isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body
            )
            if size > PROTOCOL_METHODS:
                found.append(
                    f"{path}:{node.lineno}: Protocol {node.name} has {size} methods, "
                    f"at most {PROTOCOL_METHODS}"
                )
    return len(lines), found


def python_files(folders: Iterable[Path]) -> Iterator[Path]:
    """Every Python file under ``folders``, in order; a folder that is absent holds none."""
    for folder in folders:
        yield from sorted(folder.rglob("*.py"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a report; returns 1 if a limit is broken."""
    parser = argparse.ArgumentParser(description="Check the size budget.")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    root: Path = parser.parse_args(arguments).root
    found: list[str] = []
    package = largest = 0
    for path in python_files(root / name for name in ("src", "tests", "tools", "examples")):
        name = path.relative_to(root)
        try:
            size, problems = problems_of(name, path.read_text(encoding="utf-8"))
        except SyntaxError as error:
            found.append(f"{name}:{error.lineno}: not Python: {error.msg}")
            continue
        found += problems
        if name.parts[0] == "src":
            package += size
            largest = max(largest, size)
    if package > PACKAGE_LINES:
        found.append(f"src: {package} code lines, at most {PACKAGE_LINES}")
    for line in found:
        print(line)
    print(
        f"package {package} of {PACKAGE_LINES} code lines, "
        f"its largest file {largest} of {FILE_LINES}; {len(found)} over budget"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
