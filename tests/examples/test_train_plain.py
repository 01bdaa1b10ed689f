"""The example before keepstep: it trains, equal seeds give equal weights, the diff is small."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def unified_diff() -> list[str]:
    """The lines of ``diff -U0 train_plain.py train_fsdp.py``."""
    names = ("train_plain.py", "train_fsdp.py")
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in names)
    return list(difflib.unified_diff(before, after, *names, n=0, lineterm=""))


def start(*arguments: str) -> subprocess.Popen[str]:
    """A torchrun job of two ranks on the CPU."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.Popen(
        [*command, str(EXAMPLES / "train_plain.py"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@dataclass(frozen=True)
class Outputs:
    """What three jobs printed."""

    first: str
    same_seed: str
    other_seed: str


@pytest.fixture(scope="module")
def outputs() -> Outputs:
    """Three jobs at once: most of their time is the start."""
    jobs = [start("--steps", "8", "--seed", seed) for seed in ("1", "1", "2")]
    texts = []
    for job in jobs:
        output, errors = job.communicate(timeout=100)
        assert job.returncode == 0, errors
        texts.append(output)
    return Outputs(*texts)


def digest_in(output: str) -> str:
    found = re.findall(r"^weights digest: ([0-9a-f]{64})$", output, re.MULTILINE)
    assert len(found) == 1, output
    return str(found[0])


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_plain", EXAMPLES / "train_plain.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.training
def test_validation_loss_falls_clearly_within_a_few_steps(outputs: Outputs) -> None:
    losses = [float(loss) for loss in re.findall(r"validation loss ([\d.]+)", outputs.first)]
    assert len(losses) == 2, outputs.first
    assert losses[1] < losses[0] - 0.5


@pytest.mark.training
def test_equal_seeds_give_equal_weights(outputs: Outputs) -> None:
    assert digest_in(outputs.same_seed) == digest_in(outputs.first)


@pytest.mark.training
def test_another_seed_gives_other_weights(outputs: Outputs) -> None:
    assert digest_in(outputs.other_seed) != digest_in(outputs.first)


@pytest.mark.training
def test_data_goes_on_where_its_state_says_and_differs_between_ranks(example: ModuleType) -> None:
    import torch

    preset, cpu = example.PRESETS["tiny"], torch.device("cpu")
    text, held_out = example.read_text(200_000)
    assert 0 < len(held_out) < len(text)

    data = example.Windows(text, preset, cpu, "7/0")
    data.next()
    state = data.state_dict()
    inputs, targets = data.next()
    assert torch.equal(inputs[:, 1:], targets[:, :-1])

    again = example.Windows(text, preset, cpu, "7/0")
    again.load_state_dict(state)
    assert torch.equal(again.next()[0], inputs)

    other = example.Windows(text, preset, cpu, "7/1")
    other.load_state_dict(state)
    assert not torch.equal(other.next()[0], inputs)


def test_keepstep_changes_fewer_than_25_lines_of_the_script() -> None:
    changed = [line for line in unified_diff()[2:] if line[0] in "+-"]
    assert 0 < len(changed) < 25


def test_readme_shows_the_diff_as_it_is() -> None:
    shown = re.search(r"```diff\n(.*?)\n```", (EXAMPLES / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    assert shown[1].splitlines() == unified_diff()
