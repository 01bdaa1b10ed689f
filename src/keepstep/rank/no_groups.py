"""Rounds of a job that has no torch: nothing to make, nothing to abort. Runs in the rank."""

from __future__ import annotations

from keepstep.wire.types import World


class NoGroups:
    """No communication: nothing to make, nothing to abort."""

    def form(self, world: World) -> None:
        """Nothing to do."""

    def abort(self) -> int:
        """Nothing to free."""
        return 0

    def destroy(self) -> None:
        """Nothing to take down."""

    def sequence_numbers(self) -> dict[str, int]:
        """No collectives."""
        return {}
