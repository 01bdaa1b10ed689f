"""The tables of the benchmark of checkpoints."""

from __future__ import annotations

from benchmarks import checkpoint_page, harness, page
from tests.benchmarks.test_checkpoint_figures import rank, run, scenario

SETTINGS = {"every": 10, "window": 2}


def test_a_row_has_a_cell_for_each_column() -> None:
    row = checkpoint_page.rows(scenario(gather=run(rank(), rank())), 10)[0]
    cells = dict(zip(checkpoint_page.COLUMNS, row, strict=True))
    assert cells["lost per save, s"] == "0.20 (0.10 to 0.30)"
    assert cells["share"] == "4.8%"
    assert cells["load, s"] == "0.80"
    assert cells["values right"] == "yes"


def test_wrong_values_are_told() -> None:
    row = checkpoint_page.rows(scenario(gather=run(rank(wrong_tensors=7), rank())), 10)[0]
    assert row[-1] == "**no: 7 tensors wrong**"


def test_what_failed_has_no_row_but_its_error() -> None:
    found = scenario(gather=run(error="rank 0 ended with -11: it printed no error"))
    assert checkpoint_page.rows(found, 10) == []
    assert checkpoint_page.failures(found) == [
        "gather to rank 0, `torch.save`, 1 of 1: rank 0 ended with -11: it printed no error"
    ]


def test_the_page_shows_targets_that_are_missed() -> None:
    found = scenario("spare", keepstep=run(rank()), dcp=run(rank(), memory=None))
    document = {
        "machine": {"cores": 2},
        "command": "python -m benchmarks.checkpoint",
        "settings": SETTINGS,
        "scenarios": [found],
        "options": {"`pinned`": run(error="it raises"), "`shared`": run(rank())},
    }
    text = checkpoint_page.markdown(document)
    assert "| time lost / blocking memory copy | 1.00 | at most 0.40 | **no** |" in text
    assert "| `pinned` | it raises |" in text
    assert "| `shared` | works |" in text
    assert "A core is spare: 2 ranks, each computes with 1 thread" in text


def test_the_page_has_a_place_for_the_tables() -> None:
    path = harness.ROOT / "docs" / "benchmarks.md"
    text = path.read_text(encoding="utf-8")
    assert "NEW" in page.replaced(text, "NEW")
    columns = {line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")}
    explained = {name.partition(",")[0] for name in checkpoint_page.COLUMNS} - {"system"}
    assert explained <= columns
