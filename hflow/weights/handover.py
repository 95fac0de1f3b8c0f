"""Buckets that a worker hands over to the process of the engine on its device, while it gathers them.

`HandoverSender` is the worker's end, and `HandedOver` the engine's. Two buckets exist at a time: the engine
copies each, and says so, before the worker reuses its memory.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from hflow.base.errors import WorkerFailureError
from hflow.types.tensor_slices import MAX_BUCKETS
from hflow.weights.buckets import Bucket
from hflow.weights.channels.interface import WeightChannel

_POLL_SECONDS = 0.05
_USER = struct.Struct("3i")
"""Process, user and group at the other end of a socket (`SO_PEERCRED`)."""


@dataclass(frozen=True)
class HandedOver:
    """The handles of the buckets of one version, as a receiver takes them. Iterate once.

    The consumer has copied a bucket when it asks for the next one. It waits `timeout` seconds for the sender,
    and for each bucket.
    """

    address: str
    timeout: float

    def __iter__(self) -> Iterator[Any]:
        """Yield the handles as they come.

        Raises:
            WorkerFailureError: if the sender ends, or does not send.
        """
        with self._connect() as connection:
            while (handle := self._next(connection)) is not None:
                yield handle
                with suppress(OSError):  # a sender that has ended is found by reading
                    connection.send_bytes(b"taken")

    def _connect(self) -> Connection:
        deadline = time.monotonic() + self.timeout
        while True:
            end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                end.connect(self.address)
                break
            except OSError as error:  # the sender has not begun to listen
                end.close()
                if time.monotonic() > deadline:
                    raise WorkerFailureError(
                        f"the trainer on this device sends no weights: {error}"
                    ) from None
                time.sleep(_POLL_SECONDS)
        _check_user(end)
        return Connection(end.detach())

    def _next(self, connection: Connection) -> Any:
        try:
            if connection.poll(self.timeout):
                return connection.recv()
        except (EOFError, OSError):
            raise WorkerFailureError("the trainer on this device ended while it sent weights") from None
        raise WorkerFailureError(f"the trainer on this device sent no weights for {self.timeout:g} s")


class HandoverSender:
    """The sender's end for one version at a `handover_address`; the receiver has `timeout` seconds."""

    def __init__(self, channel: WeightChannel, address: str, timeout: float) -> None:
        self._channel = channel
        self._timeout = timeout
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address)
        self._listener.listen(1)

    def send(self, receiver: int, buckets: Iterable[Bucket], has_failed: Callable[[], bool]) -> None:
        """Send all buckets of a version to the worker of the receiving rank, and wait until they are taken.

        `has_failed` is called while it has not come, and is true if it never will.

        Raises:
            WorkerFailureError: if the receiver does not come, or ends.
        """
        untaken: deque[Any] = deque()
        try:
            with self._accept(has_failed) as connection:
                for bucket in buckets:
                    if len(untaken) == MAX_BUCKETS:
                        self._wait_taken(connection, untaken)
                    handle = self._channel.send((receiver,), bucket)
                    untaken.append(handle)
                    connection.send(handle)
                connection.send(None)
                while untaken:
                    self._wait_taken(connection, untaken)
        except (EOFError, OSError):
            raise WorkerFailureError("the engine on this device ended while it was sent weights") from None
        finally:
            self._channel.free(untaken)

    def close(self) -> None:
        """Stop to listen."""
        self._listener.close()

    def _accept(self, has_failed: Callable[[], bool]) -> Connection:
        self._listener.settimeout(_POLL_SECONDS)
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline and not has_failed():
            try:
                end, _ = self._listener.accept()
            except TimeoutError:
                continue
            end.setblocking(True)
            _check_user(end)
            return Connection(end.detach())
        raise WorkerFailureError("the engine on this device does not take weights")

    def _wait_taken(self, connection: Connection, untaken: deque[Any]) -> None:
        if not connection.poll(self._timeout):
            raise WorkerFailureError(
                f"the engine on this device has taken no weights for {self._timeout:g} s"
            )
        connection.recv_bytes()
        self._channel.free([untaken.popleft()])


def handover_address(owner: str, directory: str) -> str:
    """Return the address of a sender, in the abstract namespace of Unix sockets: it ends with the process.

    `owner` names the sender and its receiver in the run that the directory is of.
    """
    return "\0hflow-weights-" + hashlib.sha256(f"{os.getuid()} {directory} {owner}".encode()).hexdigest()


def _check_user(end: socket.socket) -> None:
    """Refuse a process of another user, as messages are pickled.

    Raises:
        WorkerFailureError: if it is one.
    """
    _, user, _ = _USER.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _USER.size))
    if user != os.getuid():
        end.close()
        raise WorkerFailureError(f"user {user} has a socket of hflow's weights; end that process")
