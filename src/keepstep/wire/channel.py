"""Framed messages over a stream socket, with descriptors where the socket is a unix one.

A frame is a 4-byte little-endian length and a msgpack body of at most ``MAX_FRAME`` bytes.
Descriptors that belong to a message are sent with its first byte and taken in order.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from keepstep.errors import InternalError
from keepstep.wire.messages import Message

M = TypeVar("M")
MAX_FRAME = 64 << 20
_LENGTH = struct.Struct("<I")
_MAX_FDS = 16
_READ = 1 << 18


class Closed(Exception):
    """The other end is gone."""


def pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair of unix stream sockets."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


class Channel(Generic[M]):
    """One end of a connection.

    ``send`` may be called from any thread. In non-blocking mode unsent bytes are kept and
    ``flush`` sends them once the socket is writable: a frozen peer never blocks the sender.

    Args:
        sock: A connected stream socket; owned by the channel from now on.
        accepts: Union of the messages that may arrive.
        blocking: Whether ``send`` may wait.
    """

    def __init__(self, sock: socket.socket, accepts: object, *, blocking: bool) -> None:
        self.sock = sock
        self._blocking = blocking
        sock.setblocking(blocking)
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(accepts)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._in = bytearray()
        self._out: deque[tuple[memoryview, list[int]]] = deque()
        self._fds: deque[int] = deque()
        self._unix = sock.family == socket.AF_UNIX

    def fileno(self) -> int:
        """The socket's descriptor, -1 after ``close``."""
        return self.sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether unsent bytes wait for the socket to become writable."""
        return bool(self._out)

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send ``message`` (and duplicates of ``fds``).

        Raises:
            Closed: the other end is gone.
            InternalError: the message is larger than ``MAX_FRAME``, or has too many descriptors.
        """
        if len(fds) > _MAX_FDS:
            raise InternalError(f"a message with {len(fds)} descriptors; {_MAX_FDS} are the limit")
        body = self._encoder.encode(message)
        if len(body) > MAX_FRAME:
            raise InternalError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME}")
        frame = memoryview(_LENGTH.pack(len(body)) + body)
        held = [] if self._blocking else [os.dup(fd) for fd in fds]
        with self._lock:
            if self._blocking:
                self._send_all(frame, list(fds))
            else:
                self._out.append((frame, held))
                self._flush()

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it.

        Raises:
            Closed: the other end is gone.
        """
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        while self._out:
            frame, fds = self._out[0]
            try:
                sent = self._send_once(frame, fds)
            except BlockingIOError:
                return
            for fd in fds:
                os.close(fd)
            if sent == len(frame):
                self._out.popleft()
            else:
                self._out[0] = (frame[sent:], [])

    def _send_all(self, frame: memoryview, fds: list[int]) -> None:
        while frame:
            sent = self._send_once(frame, fds)
            frame, fds = frame[sent:], []

    def _send_once(self, frame: memoryview, fds: list[int]) -> int:
        try:
            if not fds:
                return self.sock.send(frame)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            return self.sock.sendmsg([frame], ancillary)
        except BlockingIOError:
            raise
        except OSError as error:
            raise Closed(str(error)) from error

    def read(self) -> bool:
        """Read what is there (blocking mode: wait for it). False at the end of the stream."""
        try:
            if self._unix:
                space = socket.CMSG_SPACE(_MAX_FDS * 4)
                data, ancillary, _, _ = self.sock.recvmsg(_READ, space, socket.MSG_CMSG_CLOEXEC)
                for level, kind, payload in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        fds = array.array("i")
                        fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                        self._fds.extend(fds)
            else:
                data = self.sock.recv(_READ)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._in += data
        return bool(data)

    def messages(self) -> Iterator[M]:
        """Yield the complete messages read so far.

        Raises:
            InternalError: a frame is too large or is no known message.
        """
        while len(self._in) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._in)
            if length > MAX_FRAME:
                raise InternalError(f"a frame of {length} bytes is over the limit of {MAX_FRAME}")
            end = _LENGTH.size + length
            if len(self._in) < end:
                return
            body = bytes(self._in[_LENGTH.size : end])
            del self._in[:end]
            try:
                message = self._decoder.decode(body)
            except msgspec.DecodeError as error:
                raise InternalError(f"a message could not be decoded: {error}") from error
            yield message

    def receive(self) -> M:
        """Wait for one message (blocking mode).

        Raises:
            Closed: the other end is gone.
        """
        while True:
            for message in self.messages():
                return message
            if not self.read():
                raise Closed("end of stream")

    def take_fd(self) -> int:
        """The next descriptor that came with a message; the caller owns it.

        Raises:
            InternalError: none came.
        """
        if not self._fds:
            raise InternalError("a message came without its descriptor")
        return self._fds.popleft()

    def close(self) -> None:
        """Close the socket and every descriptor not taken."""
        for _, fds in self._out:
            for fd in fds:
                os.close(fd)
        self._out.clear()
        while self._fds:
            os.close(self._fds.popleft())
        self.sock.close()
