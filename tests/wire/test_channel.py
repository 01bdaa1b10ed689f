from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.errors import InternalError
from keepstep.wire import channel as channels
from keepstep.wire.channel import MAX_FRAME, Channel, Closed, pair
from keepstep.wire.messages import (
    FROM_RANK,
    TO_RANK,
    Abort,
    Go,
    Hello,
    Message,
    SlotGrant,
    StoreCall,
    StoreReply,
)

Make = Callable[..., tuple[Channel[Any], Channel[Any]]]
BIG = bytes(1 << 20)


@pytest.fixture
def ends() -> Iterator[Make]:
    """Makes connected channels: the agent's end, the rank's end."""
    made: list[Channel[Any]] = []

    def make(
        blocking: bool = False, other_blocks: bool = False
    ) -> tuple[Channel[Any], Channel[Any]]:
        one, two = pair()
        made.append(Channel(one, FROM_RANK, blocking=blocking))
        made.append(Channel(two, TO_RANK, blocking=other_blocks))
        return made[-2], made[-1]

    yield make
    for channel in made:
        channel.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Channel[Any]]]:
    """A bare socket whose other end is a channel that accepts what ranks send."""
    one, two = pair()
    channel: Channel[Any] = Channel(two, FROM_RANK, blocking=False)
    yield one, channel
    one.close()
    channel.close()


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def encoded(message: Message) -> bytes:
    return frame(msgspec.msgpack.encode(message))


def drain(channel: Channel[Any]) -> list[Any]:
    """Everything that can be read without waiting."""
    found: list[Any] = []
    while True:
        before = len(found)
        alive = channel.read()
        found += channel.messages()
        if not alive or (len(found) == before and not channel._in):
            return found
        if len(found) == before:
            return found


def pump(sender: Channel[Any], receiver: Channel[Any], wanted: int) -> list[Any]:
    """Flush and read in turns until ``wanted`` messages came."""
    found: list[Any] = []
    for _ in range(10_000):
        sender.flush()
        receiver.read()
        found += receiver.messages()
        if len(found) >= wanted:
            return found
    raise AssertionError(f"{len(found)} of {wanted} messages came")


def inode(fd: int) -> int:
    return os.fstat(fd).st_ino


def memfd(text: bytes) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(fd, text)
    return fd


# --- frames --------------------------------------------------------------------------------------


def test_messages_come_whole_and_in_order(ends: Make) -> None:
    agent, rank = ends()
    for number in range(50):
        rank.send(Hello(pid=number))
    assert [message.pid for message in drain(agent)] == list(range(50))


@settings(max_examples=60)
@given(cuts=st.lists(st.integers(1, 40), max_size=40), count=st.integers(1, 4))
def test_a_message_that_comes_in_pieces_is_one_message(cuts: list[int], count: int) -> None:
    one, two = pair()
    channel: Channel[Any] = Channel(two, FROM_RANK, blocking=False)
    try:
        rest = b"".join(encoded(Hello(pid=1 << (number * 9))) for number in range(count))
        found: list[Any] = []
        for cut in [*cuts, len(rest)]:
            one.sendall(rest[:cut])
            rest = rest[cut:]
            assert channel.read()
            found += channel.messages()
            assert len(found) == count or rest
        assert [message.pid for message in found] == [1 << (n * 9) for n in range(count)]
    finally:
        one.close()
        channel.close()


def test_an_empty_read_is_not_the_end(ends: Make) -> None:
    agent, _ = ends()
    assert agent.read()
    assert list(agent.messages()) == []


def test_a_blocking_end_waits_for_its_message(ends: Make) -> None:
    agent, rank = ends(other_blocks=True)
    agent.send(Go(term=1, round=2, resume=3, folder="f"))
    agent.send(Abort(round=2, reason="why"))
    assert rank.receive() == Go(term=1, round=2, resume=3, folder="f")
    assert rank.receive() == Abort(round=2, reason="why")


def test_an_oversize_frame_is_refused_before_its_bytes_are_taken(
    raw: tuple[socket.socket, Channel[Any]],
) -> None:
    sock, channel = raw
    sock.sendall(struct.pack("<I", MAX_FRAME + 1))
    channel.read()
    with pytest.raises(InternalError, match=f"{MAX_FRAME + 1} bytes is over the limit"):
        list(channel.messages())


def test_an_oversize_message_is_not_sent(ends: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, rank = ends()
    monkeypatch.setattr(channels, "MAX_FRAME", 1000)
    with pytest.raises(InternalError, match="over the limit of 1000"):
        agent.send(StoreReply(id=1, values=[bytes(2000)]))
    assert not agent.wants_write
    agent.send(StoreReply(id=2))
    assert [message.id for message in drain(rank)] == [2]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(msgspec.msgpack.encode({"type": "Nonsense"}), id="unknown tag"),
        pytest.param(msgspec.msgpack.encode({"pid": 1}), id="no tag"),
        pytest.param(msgspec.msgpack.encode({"type": "Hello", "pid": "1"}), id="wrong type"),
        pytest.param(msgspec.msgpack.encode({"type": "Hello"}), id="missing field"),
        pytest.param(msgspec.msgpack.encode({"type": "Go", "round": 1}), id="other direction"),
        pytest.param(msgspec.msgpack.encode([1, 2]), id="no map"),
        pytest.param(b"\xc1", id="no msgpack"),
        pytest.param(b"", id="empty"),
        pytest.param(msgspec.msgpack.encode({"type": "Hello", "pid": 1})[:-1], id="cut"),
        pytest.param(msgspec.msgpack.encode({"type": "Hello", "pid": 1}) + b"\0", id="more"),
    ],
)
def test_what_is_no_known_message_is_refused(
    raw: tuple[socket.socket, Channel[Any]], body: bytes
) -> None:
    sock, channel = raw
    sock.sendall(frame(body))
    channel.read()
    with pytest.raises(InternalError, match="could not be decoded"):
        list(channel.messages())


# --- a peer that does not read ------------------------------------------------------------------


def test_a_peer_that_does_not_read_never_blocks_the_sender_and_gets_all_of_it_later(
    ends: Make,
) -> None:
    agent, rank = ends()
    for number in range(20):
        agent.send(StoreReply(id=number, values=[BIG]))  # 20 MiB: more than any socket takes
    assert agent.wants_write
    got = pump(agent, rank, 20)
    assert [message.id for message in got] == list(range(20))
    assert all(message.values == [BIG] for message in got)
    assert not agent.wants_write


def test_two_threads_do_not_mix_their_frames(ends: Make) -> None:
    agent, rank = ends()
    body = os.urandom(3000)

    def send(start: int) -> None:
        for number in range(start, start + 200):
            rank.send(StoreCall(id=number, inc=0, round=1, op="set", keys=["k"], values=[body]))

    threads = [threading.Thread(target=send, args=(start,)) for start in (0, 1000)]
    for thread in threads:
        thread.start()
    got = pump(rank, agent, 400)
    for thread in threads:
        thread.join()
    assert [m.id for m in got if m.id < 1000] == list(range(200))
    assert [m.id for m in got if m.id >= 1000] == list(range(1000, 1200))
    assert all(message.values == [body] for message in got)


# --- the other end is gone ------------------------------------------------------------------------


def test_what_was_sent_before_the_end_can_still_be_read(ends: Make) -> None:
    agent, rank = ends()
    rank.send(Hello(pid=5))
    rank.close()
    assert agent.read()
    assert [message.pid for message in agent.messages()] == [5]
    assert not agent.read()


def test_a_frame_cut_by_the_end_is_never_a_message(
    raw: tuple[socket.socket, Channel[Any]],
) -> None:
    sock, channel = raw
    sock.sendall(encoded(Hello(pid=5))[:-1])
    sock.close()
    assert channel.read()
    assert not channel.read()
    assert list(channel.messages()) == []


@pytest.mark.parametrize("blocking", [True, False])
def test_sending_to_nobody_says_closed(ends: Make, blocking: bool) -> None:
    agent, rank = ends(blocking=blocking)
    rank.close()
    with pytest.raises(Closed):
        agent.send(Hello(pid=1))


def test_flushing_to_nobody_says_closed(ends: Make) -> None:
    agent, rank = ends()
    agent.send(StoreReply(id=1, values=[BIG]))
    rank.close()
    with pytest.raises(Closed):
        agent.flush()


def test_waiting_for_nobody_says_closed(ends: Make) -> None:
    agent, rank = ends(other_blocks=True)
    agent.close()
    with pytest.raises(Closed):
        rank.receive()


def test_a_closed_channel_has_no_descriptor(ends: Make) -> None:
    agent, _ = ends()
    assert agent.fileno() >= 0
    agent.close()
    assert agent.fileno() == -1


# --- descriptors ---------------------------------------------------------------------------------


def test_each_descriptor_comes_with_its_message_over_many_messages(ends: Make) -> None:
    agent, rank = ends()
    wanted: list[int] = []
    for number in range(100):
        fds = tuple(memfd(b"%d.%d" % (number, place)) for place in range(number % 4))
        agent.send(SlotGrant(slot=number, size=len(fds)), fds)
        wanted += [inode(fd) for fd in fds]
        for fd in fds:
            os.close(fd)  # the channel has duplicates of its own
    got: list[int] = []
    for grant in pump(agent, rank, 100):
        for place in range(grant.size):
            fd = rank.take_fd()
            assert os.pread(fd, 20, 0) == b"%d.%d" % (grant.slot, place)
            assert not os.get_inheritable(fd)
            got.append(inode(fd))
            os.close(fd)
    assert got == wanted
    with pytest.raises(InternalError, match="without its descriptor"):
        rank.take_fd()


def test_descriptors_of_messages_that_had_to_wait_come_too(ends: Make) -> None:
    agent, rank = ends()
    agent.send(StoreReply(id=0, values=[BIG, BIG]))
    fd = memfd(b"late")
    agent.send(SlotGrant(slot=1, size=4), (fd,))
    os.close(fd)
    assert agent.wants_write
    _, grant = pump(agent, rank, 2)
    assert grant == SlotGrant(slot=1, size=4)
    got = rank.take_fd()
    assert os.pread(got, 10, 0) == b"late"
    os.close(got)


def test_a_blocking_sender_keeps_its_descriptors(ends: Make) -> None:
    agent, rank = ends(blocking=True)
    fd = memfd(b"mine")
    agent.send(SlotGrant(slot=1, size=4), (fd,))
    assert os.pread(fd, 10, 0) == b"mine"
    os.close(fd)
    assert drain(rank) == [SlotGrant(slot=1, size=4)]
    os.close(rank.take_fd())


def test_more_descriptors_than_a_receiver_takes_are_refused(ends: Make) -> None:
    agent, rank = ends()
    fd = memfd(b"one")
    with pytest.raises(InternalError, match="17 descriptors"):
        agent.send(SlotGrant(slot=1, size=4), (fd,) * 17)
    agent.send(SlotGrant(slot=2, size=4), (fd,) * 16)
    os.close(fd)
    assert drain(rank) == [SlotGrant(slot=2, size=4)]
    for _ in range(16):
        os.close(rank.take_fd())


def test_close_releases_descriptors_unsent_and_untaken(ends: Make) -> None:
    agent, rank = ends()
    before = set(os.listdir("/proc/self/fd"))
    fd = memfd(b"x")
    agent.send(SlotGrant(slot=0, size=1), (fd, fd))
    agent.send(StoreReply(id=1, values=[BIG]))  # fills the socket
    agent.send(SlotGrant(slot=2, size=1), (fd, fd))
    os.close(fd)
    rank.read()
    assert len(set(os.listdir("/proc/self/fd")) - before) == 4
    agent.close()
    rank.close()
    assert set(os.listdir("/proc/self/fd")) < before


def test_a_failed_send_releases_its_descriptors(ends: Make) -> None:
    agent, rank = ends()
    rank.close()
    before = set(os.listdir("/proc/self/fd"))
    fd = memfd(b"x")
    with pytest.raises(Closed):
        agent.send(SlotGrant(slot=0, size=1), (fd,))
    os.close(fd)
    agent.close()
    assert set(os.listdir("/proc/self/fd")) < before


def test_a_tcp_socket_carries_messages_too() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    two, _ = listener.accept()
    listener.close()
    agent: Channel[Any] = Channel(one, FROM_RANK, blocking=True)
    rank: Channel[Any] = Channel(two, TO_RANK, blocking=True)
    agent.send(Abort(round=1, reason="test"))
    assert rank.receive() == Abort(round=1, reason="test")
    agent.close()
    assert not rank.read()
    rank.close()
