"""The agent: one process per node that starts, watches, ends and replaces ranks. No torch here."""
