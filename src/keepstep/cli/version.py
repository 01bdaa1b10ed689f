"""``keepstep version``: what is installed. Imports next to nothing, so that it is quick."""

from __future__ import annotations

import importlib.metadata
import platform

_SHOWN = ("torch", "msgspec", "safetensors", "xxhash", "psutil", "typer", "rich")
_EXTRAS = ("nvidia-resiliency-ext",)
"""Shown only where they are installed: most runs do without."""


def version(package: str = "keepstep") -> str:
    """The version of an installed package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def summary() -> str:
    """One line: name and version of keepstep."""
    return f"keepstep {version() or '(not installed as a package)'}"


def details() -> str:
    """A line each for keepstep, Python, the system and the packages that keepstep works with."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    packages = [f"{name} {version(name) or 'not installed'}" for name in _SHOWN]
    packages += [f"{name} {found}" for name in _EXTRAS if (found := version(name))]
    return "\n".join([summary(), f"Python {platform.python_version()}", system, *packages])
