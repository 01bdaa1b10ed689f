from __future__ import annotations

from pathlib import Path

import msgspec
import typer
from typer.testing import CliRunner

from keepstep.cli.report import report
from keepstep.errors import UsageError
from tests.goodput.runlog import four_faults

app = typer.Typer()
app.command()(report)


def test_report_prints_tables(tmp_path: Path) -> None:
    four_faults().write(tmp_path)
    result = CliRunner().invoke(app, [str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "run invented, engine native" in result.output
    assert "Goodput 42.6% of 23.5 s" in result.output


def test_report_prints_nothing_but_json_with_json(tmp_path: Path) -> None:
    four_faults().write(tmp_path)
    result = CliRunner().invoke(app, [str(tmp_path), "--json"])
    record = msgspec.json.decode(result.output)
    assert record["v"] == 1 and len(record["faults"]) == 4
    assert abs(sum(record["categories"].values()) - record["wall_s"]) < 1e-6


def test_folder_that_does_not_exist_is_our_usage_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [str(tmp_path / "none")])
    assert isinstance(result.exception, UsageError)
