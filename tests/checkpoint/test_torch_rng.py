"""Random generators come back to where they were."""

from __future__ import annotations

import random
import sys
import types

import pytest
import torch

from keepstep.checkpoint.torch_rng import RngState
from keepstep.errors import CheckpointMismatch


def test_both_generators_go_on_from_where_they_were() -> None:
    rng = RngState()
    state = rng.state_dict()
    first = (random.random(), torch.rand(3).tolist(), random.gauss(0, 1))
    rng.load_state_dict(state)
    assert (random.random(), torch.rand(3).tolist(), random.gauss(0, 1)) == first


def test_numpys_generator_is_kept_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    # numpy itself is no dependency; this has its two functions.
    held: list[tuple[object, ...]] = [("MT19937", [1, 2, 3], 7, 0, 0.5)]
    fake = types.ModuleType("numpy.random")
    fake.get_state = lambda: held[0]  # type: ignore[attr-defined]
    fake.set_state = lambda state: held.__setitem__(0, state)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "numpy", types.ModuleType("numpy"))
    monkeypatch.setitem(sys.modules, "numpy.random", fake)
    state = RngState().state_dict()
    held[0] = ("MT19937", [9], 1, 0, 0.0)
    RngState().load_state_dict(state)
    assert held[0] == ("MT19937", [1, 2, 3], 7, 0, 0.5)


def test_numpys_state_is_left_out_where_it_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy.random", raising=False)
    assert "numpy" not in RngState().state_dict()


@pytest.mark.parametrize("state", [{}, {"python": 3}, {"python": random.getstate(), "torch": 1}])
def test_something_else_is_refused(state: dict[str, object]) -> None:
    before = torch.get_rng_state()
    with pytest.raises((CheckpointMismatch, AttributeError)):
        RngState().load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), before)
