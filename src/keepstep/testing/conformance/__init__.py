"""Conformance suites: what an engine must do at each seam, as named clauses. Run in tests.

One suite a seam: ``heartbeat``, ``shard_writer``, ``restarter``. Each has ``clauses()`` and
``verify(make, differences)``; an engine passes if every clause holds but those that it names as
documented differences, and each of these does not hold (else the document is out of date).
"""

from __future__ import annotations

from keepstep.testing.conformance.clauses import Clause, Result, require, run

__all__ = ["Clause", "Result", "require", "run"]
