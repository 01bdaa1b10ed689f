from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from keepstep.errors import InternalError
from keepstep.wire.channel import Channel, Closed, pair
from keepstep.wire.loop import Loop
from keepstep.wire.messages import FROM_RANK, TO_RANK, Hello, StoreReply

BIG = bytes(4 << 20)
Connect = Callable[..., "Peer"]


class Peer:
    """A channel served by the loop, the other end of it, and what the loop reported."""

    def __init__(self, loop: Loop, handler: Callable[[Any], None] | None = None) -> None:
        one, two = pair()
        self.served: Channel[Any] = Channel(one, FROM_RANK, blocking=False)
        self.other: Channel[Any] = Channel(two, TO_RANK, blocking=False)
        self.got: list[int] = []
        self.lost = 0
        loop.add(self.served, handler or self._got, self._lost)

    def _got(self, message: Any) -> None:
        self.got.append(message.pid)

    def _lost(self) -> None:
        self.lost += 1

    def close(self) -> None:
        self.served.close()
        self.other.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def connect(loop: Loop) -> Iterator[Connect]:
    peers: list[Peer] = []

    def make(handler: Callable[[Any], None] | None = None) -> Peer:
        peers.append(Peer(loop, handler))
        return peers[-1]

    yield make
    for peer in peers:
        loop.remove(peer.served)
        peer.close()


def turns(loop: Loop, count: int = 5) -> None:
    for _ in range(count):
        loop.turn(0)


def test_messages_of_all_peers_are_handed_over_in_order(loop: Loop, connect: Connect) -> None:
    first, second = connect(), connect()
    for pid in range(5):
        first.other.send(Hello(pid=pid))
        second.other.send(Hello(pid=10 + pid))
    turns(loop)
    assert first.got == [0, 1, 2, 3, 4]
    assert second.got == [10, 11, 12, 13, 14]


def test_a_turn_without_work_ends_after_its_time(loop: Loop, connect: Connect) -> None:
    peer = connect()
    loop.turn(0.001)
    assert (peer.got, peer.lost) == ([], 0)


def test_a_lost_peer_is_reported_once_after_its_last_message(loop: Loop, connect: Connect) -> None:
    peer = connect()
    peer.other.send(Hello(pid=7))
    peer.other.close()
    turns(loop)
    assert (peer.got, peer.lost) == ([7], 1)


def test_a_peer_that_is_found_gone_by_writing_is_reported_once(
    loop: Loop, connect: Connect
) -> None:
    peer = connect()
    peer.served.send(StoreReply(id=1, values=[BIG]))
    peer.other.close()
    turns(loop)
    assert peer.lost == 1


def test_the_last_message_of_a_peer_that_went_with_unread_mail_is_not_lost(
    loop: Loop, connect: Connect
) -> None:
    peer = connect()
    peer.served.send(StoreReply(id=1, values=[BIG]))
    assert peer.served.wants_write
    for pid in range(100):
        peer.other.send(Hello(pid=pid))
    peer.other.close()
    turns(loop, 20)
    assert peer.got == list(range(100))
    assert peer.lost == 1


def test_a_peer_that_never_reads_holds_up_nobody(loop: Loop, connect: Connect) -> None:
    frozen, alive = connect(), connect()
    frozen.served.send(StoreReply(id=1, values=[BIG]))
    for pid in range(3):
        alive.other.send(Hello(pid=pid))
        loop.turn(0)
    assert alive.got == [0, 1, 2]
    assert frozen.served.wants_write
    assert frozen.lost == 0


def test_what_waits_is_sent_once_the_peer_reads(loop: Loop, connect: Connect) -> None:
    peer = connect()
    peer.served.send(StoreReply(id=1, values=[BIG]))
    got: list[Any] = []
    for _ in range(1000):
        loop.turn(0)
        peer.other.read()
        got += peer.other.messages()
        if got:
            break
    assert [message.id for message in got] == [1]
    assert not peer.served.wants_write


def test_another_thread_can_end_a_turn_that_waits_for_ever(loop: Loop) -> None:
    thread = threading.Thread(target=loop.wake)
    thread.start()
    loop.turn(None)
    thread.join()


def test_any_number_of_wake_ups_ends_turns_and_does_not_block(loop: Loop, connect: Connect) -> None:
    peer = connect()
    for _ in range(70_000):  # more than a pipe holds
        loop.wake()
    peer.other.send(Hello(pid=1))
    turns(loop, 30)
    assert peer.got == [1]


def test_the_wake_up_descriptor_takes_what_a_signal_writes(loop: Loop) -> None:
    os.write(loop.wake_fd, b"\x0f")
    loop.turn(None)


def test_a_removed_channel_is_not_served_and_not_closed(loop: Loop, connect: Connect) -> None:
    peer = connect()
    peer.other.send(Hello(pid=1))
    loop.remove(peer.served)
    loop.remove(peer.served)
    turns(loop)
    assert (peer.got, peer.lost) == ([], 0)
    assert peer.served.fileno() >= 0


def test_a_handler_may_remove_and_close_another_peer_in_the_same_turn(
    loop: Loop, connect: Connect
) -> None:
    closed: list[str] = []
    peers: dict[str, Peer] = {}

    def close_other(name: str) -> Callable[[Any], None]:
        def handle(_message: Any) -> None:
            other = peers[name]
            closed.append(name)
            loop.remove(other.served)
            other.served.close()

        return handle

    peers["a"], peers["b"] = connect(close_other("b")), connect(close_other("a"))
    peers["a"].other.send(Hello(pid=1))
    peers["b"].other.send(Hello(pid=2))
    turns(loop)
    assert len(closed) == 1  # whoever came first closed the other, whose message is not handed over
    assert peers["a"].lost + peers["b"].lost == 0


def test_a_handler_may_close_its_own_peer(loop: Loop, connect: Connect) -> None:
    peers: list[Peer] = []

    def handle(_message: Any) -> None:
        loop.remove(peers[0].served)
        peers[0].served.close()

    peers.append(connect(handle))
    peers[0].other.send(Hello(pid=1))
    turns(loop)
    assert peers[0].lost == 0


def test_a_handler_that_finds_another_peer_gone_does_not_lose_its_own(
    loop: Loop, connect: Connect
) -> None:
    def handle(_message: Any) -> None:
        raise Closed("gone")

    peer = connect(handle)
    peer.other.send(Hello(pid=1))
    turns(loop)
    assert peer.lost == 0


def test_bytes_that_are_no_message_are_an_error_of_the_loop(loop: Loop) -> None:
    one, two = pair()
    channel: Channel[Any] = Channel(one, FROM_RANK, blocking=False)
    loop.add(channel, lambda message: None, lambda: None)
    with contextlib.closing(two), contextlib.closing(channel):
        two.sendall(struct.pack("<I", 1) + b"\xc1")
        with pytest.raises(InternalError, match="could not be decoded"):
            loop.turn(0)
        loop.remove(channel)


def test_a_tcp_peer_that_resets_the_connection_is_lost(loop: Loop) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    two, _ = listener.accept()
    listener.close()
    lost: list[str] = []
    channel: Channel[Any] = Channel(two, FROM_RANK, blocking=False)
    loop.add(channel, lambda message: None, lambda: lost.append("lost"))
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.close()
    loop.turn(None)
    turns(loop)
    assert lost == ["lost"]
    channel.close()
