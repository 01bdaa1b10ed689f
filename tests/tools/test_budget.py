from __future__ import annotations

from pathlib import Path

import pytest

from tools import budget


def lines_of(source: str) -> int:
    size, problems = budget.problems_of(Path("x.py"), source)
    assert problems == []
    return size


def test_blank_lines_comments_and_docstrings_are_free() -> None:
    assert lines_of('"""Module\n\ntext."""\n\n# comment\nx = 1  # counted\n"""About x."""\n') == 1


def test_a_string_over_three_lines_that_is_a_value_counts_three() -> None:
    assert lines_of('x = """a\n\nb"""\n') == 3


def test_a_file_at_the_limit_is_fine_and_one_line_more_is_not() -> None:
    assert lines_of("x = 1\n" * budget.FILE_LINES) == budget.FILE_LINES
    _, problems = budget.problems_of(Path("x.py"), "x = 1\n" * (budget.FILE_LINES + 1))
    assert problems == ["x.py: 401 code lines, at most 400"]


@pytest.mark.parametrize("head", ["def long():", "async def long():"])
def test_a_function_counts_its_head_and_not_its_docstring(head: str) -> None:
    body = '    """Text.\n\n    More."""\n' + "    x = 1\n" * (budget.FUNCTION_LINES - 1)
    lines_of(f"{head}\n{body}")
    _, problems = budget.problems_of(Path("x.py"), f"\n{head}\n{body}    x = 2\n")
    assert problems == ["x.py:2: long has 61 code lines, at most 60"]


@pytest.mark.parametrize("base", ["Protocol", "typing.Protocol", "Protocol[T]"])
def test_a_wide_protocol_is_reported_and_a_wide_class_is_not(base: str) -> None:
    methods = "".join(f"    def m{number}(self): ...\n" for number in range(5))
    assert lines_of(f"class Wide(object):\n{methods}") == 6
    _, problems = budget.problems_of(Path("x.py"), f"class Wide({base}):\n{methods}")
    assert problems == ["x.py:1: Protocol Wide has 5 methods, at most 4"]


def test_the_report_fails_for_a_package_that_is_too_large(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("x = 1\ny = 2\n")
    assert budget.main(["--root", str(tmp_path)]) == 0
    monkeypatch.setattr(budget, "PACKAGE_LINES", 1)
    assert budget.main(["--root", str(tmp_path)]) == 1
    assert "src: 2 code lines, at most 1" in capsys.readouterr().out


def test_a_file_that_is_not_python_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "bad.py").write_text("def (:\n")
    assert budget.main(["--root", str(tmp_path)]) == 1
    assert "tools/bad.py:1: not Python" in capsys.readouterr().out
