"""Settings: frozen dataclasses, one section each, and where their values come from.

The only package that reads the environment.
"""

from keepstep.config.settings import (
    CheckpointSettings,
    Config,
    EngineSettings,
    FaultSettings,
    HeartbeatSettings,
    NvrxSettings,
    Parts,
    RankSettings,
    RestartSettings,
    RunSettings,
)

__all__ = [
    "CheckpointSettings",
    "Config",
    "EngineSettings",
    "FaultSettings",
    "HeartbeatSettings",
    "NvrxSettings",
    "Parts",
    "RankSettings",
    "RestartSettings",
    "RunSettings",
]
