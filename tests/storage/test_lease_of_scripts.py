"""Two scripts without a launcher, and one folder of checkpoints."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.storage.scripts import LIMIT_S, Saver

pytestmark = pytest.mark.training


def test_a_second_script_is_refused_while_the_first_lives_and_not_after_its_kill(
    tmp_path: Path,
) -> None:
    with Saver(tmp_path) as first, Saver(tmp_path) as second:
        assert first.ask("save 1") == "ok"
        assert first.ask("finalize 30") == "ok"
        error = second.ask("save 1")
        assert error.startswith("FolderInUse another job saves into the checkpoint folder")
        assert f"process {first.process.pid} on " in error
        assert second.ask("restore") == "ok 1 1"  # reading is free
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(LIMIT_S)
        assert second.ask("save 2") == "ok"
        assert second.ask("finalize 30") == "ok"
        assert second.end()[0] == 0
    with Saver(tmp_path) as third:
        assert third.ask("save 3") == "ok"
        assert third.end()[0] == 0


def test_a_script_whose_folder_was_taken_over_commits_nothing_more(tmp_path: Path) -> None:
    with Saver(tmp_path) as first:
        assert first.ask("save 1") == "ok"
        assert first.ask("finalize 30") == "ok"
        (tmp_path / "leases" / "00000007.json").write_text("{}")
        assert first.ask("save 2") == "ok"
        error = first.ask("finalize 30")
        assert error.startswith("SaveFailed") and "taken over by another job (lease 7" in error
        assert first.ask("restore") == "ok 1 1"
