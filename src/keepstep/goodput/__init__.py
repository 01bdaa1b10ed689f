"""Where the time of a run went, and what its faults cost: read from event files, after or during
the run. Pure but for ``report.build``; no process of a running job needs it."""
