"""The observer's selector."""

from __future__ import annotations

import os

from keepstep.agent.observe.waiter import Waiter


def test_what_can_be_read_is_served_until_it_is_removed() -> None:
    waiter = Waiter()
    read, write = os.pipe()
    found: list[bytes] = []
    waiter.add(read, lambda: found.append(os.read(read, 10)))
    os.write(write, b"one")
    waiter.turn(10.0)
    waiter.remove(read)
    os.write(write, b"two")
    waiter.turn(0.0)
    assert found == [b"one"]
    waiter.close()
    os.close(read)
    os.close(write)


def test_a_wake_up_ends_the_wait_and_after_the_end_it_does_nothing() -> None:
    waiter = Waiter()
    for _ in range(100_000):  # more than the pipe takes
        waiter.wake()
    waiter.turn(1000.0)
    waiter.close()
    waiter.wake()
