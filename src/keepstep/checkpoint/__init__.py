"""Checkpoints: their form on storage, how they are written, committed, found and checked.

Modules without torch are used by agent, coordinator, writer and command line; ``torch_*`` by ranks.
"""
