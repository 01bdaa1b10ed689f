"""What runs in a rank's process, and the zygote that is the parent of all of them.

The rank's side of every mechanism: groups, restart, staging, heartbeat, store.
"""
