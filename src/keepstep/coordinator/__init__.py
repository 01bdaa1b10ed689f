"""The coordinator: one process for a job, without torch. Membership, rounds, saves, the store."""
