"""What travels between processes: typed messages, framing, and torch's store as plain data."""
