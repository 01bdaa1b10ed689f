from __future__ import annotations

import pytest

from keepstep.cli import version as module


@pytest.mark.parametrize("nvrx", ["0.4.1", ""])
def test_nvrx_is_listed_where_it_is_installed(nvrx: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"keepstep": "0.1.0", "nvidia-resiliency-ext": nvrx}
    monkeypatch.setattr(module, "version", lambda package="keepstep": versions.get(package, ""))
    shown = [line for line in module.details().splitlines() if "nvidia" in line]
    assert shown == (["nvidia-resiliency-ext 0.4.1"] if nvrx else [])


def test_a_package_that_is_needed_and_missing_is_said_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "version", lambda package="keepstep": "")
    lines = module.details().splitlines()
    assert "torch not installed" in lines
    assert lines[0] == "keepstep (not installed as a package)"
