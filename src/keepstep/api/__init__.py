"""What a training script uses: ``run`` with a ``Job``, ``restartable``, ``heartbeat``,
``Checkpointer``. Runs in the rank; scripts import these names from ``keepstep``.
"""
