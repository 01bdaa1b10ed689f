"""Faults that are injected on purpose: what fires where (``plan``), and how (``triggers``)."""

from keepstep.faults.plan import KINDS, Fault, FaultPlan, claim

__all__ = ["KINDS", "Fault", "FaultPlan", "claim"]
