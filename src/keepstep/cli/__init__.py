"""The command ``keepstep``: one module a subcommand. No torch here, and the work is done below."""
