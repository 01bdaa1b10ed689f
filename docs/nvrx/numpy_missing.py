"""0.4.1 and 0.5: NVRx's checkpoints need numpy, and its package does not ask for it.

    python numpy_missing.py

In 0.5 in-process restart needs it too. 0.6 and newer ask for it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys

from ranks import verdict


def main() -> None:
    wanted = importlib.metadata.requires("nvidia-resiliency-ext") or []
    names = [line for line in wanted if line.startswith("numpy")]
    sys.modules["numpy"] = None  # as if it were not installed
    try:
        importlib.import_module("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
    except ImportError as error:
        verdict(not names, f"{error}, and the package asks for {names or 'no numpy'}")
    verdict(False, "it was imported without numpy")


if __name__ == "__main__":
    main()
