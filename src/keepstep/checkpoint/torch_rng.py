"""Random generators of a rank: python's, numpy's, torch's on CPU and on the current CUDA device.

Runs in the ranks. Restored last, after iterators are made, so that what they draw does not count.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from keepstep.errors import CheckpointMismatch


class RngState:
    """Gives and takes the state of all random generators of this process.

    numpy's is kept only if the script has loaded numpy, CUDA's only if the rank uses CUDA.
    """

    def state_dict(self) -> dict[str, object]:
        """The generators' states now."""
        state: dict[str, object] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if "numpy.random" in sys.modules:
            name, keys, *rest = sys.modules["numpy.random"].get_state()
            # As numbers: reading it back then needs no array type.
            state["numpy"] = (str(name), [int(key) for key in keys], *rest)
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Set the generators to ``state``.

        Raises:
            CheckpointMismatch: it is no state of random generators.
        """
        values: Mapping[str, Any] = state
        try:
            random.setstate(values["python"])
            if "numpy" in values:
                name, keys, *rest = values["numpy"]
                self._set_numpy((name, keys, *rest))
            torch.set_rng_state(values["torch"].cpu())
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointMismatch(
                f"this is no state of random generators: {error}",
                advice="use a checkpoint that was saved with the same object",
            ) from error
        if "cuda" in values and torch.cuda.is_available():
            torch.cuda.set_rng_state(values["cuda"].cpu())

    @staticmethod
    def _set_numpy(state: tuple[object, ...]) -> None:
        try:
            numpy: Any = importlib.import_module("numpy.random")
        except ImportError:
            return  # a script that cannot import numpy draws nothing from it
        numpy.set_state(state)
