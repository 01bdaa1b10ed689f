"""Fault-tolerant FSDP training."""
