from __future__ import annotations

import json
from pathlib import Path

from keepstep.checkpoint import layout
from keepstep.checkpoint.blocks import BLOCK_BYTES
from keepstep.checkpoint.commit import commit
from tests.checkpoint.shards import flip, image, make_version, write
from tests.cli.checkpoint.commands import run_command as _run


def test_verify_says_good_for_each_checkpoint(run: Path) -> None:
    result = _run("verify", run)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == ["step-00000005: good", "step-00000010: good"]


def test_verify_exits_with_1_and_names_the_damaged_file(run: Path) -> None:
    flip(run / "checkpoints/step-00000005" / layout.shard_name(1), 4100)
    result = _run("verify", run)
    assert result.exit_code == 1
    size = (run / "checkpoints/step-00000005" / layout.shard_name(1)).stat().st_size
    assert (
        "step-00000005: BAD\n  rank-00001.safetensors: checksum: 1 of its 1 blocks differ from "
        f"what was committed: bytes 0 to {size - 1}\n" in result.stdout
    )
    assert "step-00000010: good" in result.stdout
    assert _run("verify", run, "--step", "10").exit_code == 0
    assert _run("verify", run, "--step", "5", "--quick").exit_code == 0


def test_verify_finds_what_ls_no_longer_offers(run: Path) -> None:
    (run / "checkpoints/step-00000010" / layout.shard_name(0)).unlink()
    result = _run("verify", run, "--quick")
    assert result.exit_code == 1
    assert "rank-00000.safetensors: missing" in result.stdout


def test_verify_lists_the_damaged_byte_ranges(tmp_path: Path) -> None:
    version = make_version(world=1)
    data = image(version, 0, pad=5 * BLOCK_BYTES)
    _, folder = write(tmp_path, version, 0, data)
    commit(tmp_path, folder, version)
    file = tmp_path / folder / layout.shard_name(0)
    for block in (0, 1, 3):
        flip(file, block * BLOCK_BYTES + 5)
    result = _run("verify", tmp_path)
    assert result.exit_code == 1
    first = f"bytes 0 to {2 * BLOCK_BYTES - 1}"
    second = f"bytes {3 * BLOCK_BYTES} to {4 * BLOCK_BYTES - 1}"
    assert f"\n    {first}\n    {second}\n" in result.stdout
    found = json.loads(_run("verify", tmp_path, "--json").stdout)
    (verdict,) = found["checkpoints"]
    assert not verdict["good"]
    assert verdict["problems"][0]["ranges"] == [
        [0, 2 * BLOCK_BYTES],
        [3 * BLOCK_BYTES, 4 * BLOCK_BYTES],
    ]
