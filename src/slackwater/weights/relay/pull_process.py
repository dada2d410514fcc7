"""Pulls in a separate process, so that an engine's steps never wait for the GIL.

The process receives, verifies and applies, and keeps copies for later deltas; the caller maps
complete versions. When the caller's socket closes, the process exits; its memory is anonymous. If
the process dies, the current pull fails, its copies are lost, and the next pull starts a new one.
"""

import logging
import mmap
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np

from slackwater.model.errors import RefusedError, SlackwaterError, UnavailableError
from slackwater.model.payload import Payload
from slackwater.weights.delta.apply import apply
from slackwater.weights.delta.encode import encode
from slackwater.weights.relay import protocol
from slackwater.weights.relay.bucket import tensor_memory
from slackwater.weights.relay.client import Address
from slackwater.weights.relay.manifest import TensorEntry
from slackwater.weights.relay.memory import allocate_shared, descriptor_of, map_shared
from slackwater.weights.relay.publisher import HostVersion
from slackwater.weights.relay.reader import RelayReader
from slackwater.weights.relay.receiver import Receiver
from slackwater.wire.agent import SECRET
from slackwater.wire.forked_process import fork, has_one_thread
from slackwater.wire.framed_socket import LENGTH, receive_into, receive_message

logger = logging.getLogger(__name__)

NICENESS = 19  # pulls use idle cores, and hardly slow a step that needs its core
_ENDS_WITHIN_S = 10.0
_REPLY_BYTES = 1 << 16
_LATE_S = 60.0  # beyond a pull's own time limit, before its process counts as stuck


class PullRequest(msgspec.Struct, frozen=True):
    """Pull a version by this route; copies in `reading` are in use and must not change."""

    version: str
    route: tuple[Payload, ...]
    keep: bool
    within_s: float
    reading: tuple[str, ...]


class PulledVersion(msgspec.Struct, frozen=True):
    """A pulled version, sent with its memory's descriptor."""

    tensors: tuple[TensorEntry, ...]
    meta: dict[str, Any]


class PullProcess:
    """The caller's end: one pull at a time. The process starts at once, so that no pull waits for
    its imports, and keeps copies as bases of deltas.
    """

    def __init__(self, relay: Address, secret: bytes, *, node: str, keep: int) -> None:
        self._secret = secret
        self._arguments = (relay[0], str(relay[1]), node, str(keep))
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._mapped_versions: dict[str, weakref.ref[mmap.mmap]] = {}
        self._closed = False
        self._ensure_started()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def take(
        self, version: str, route: Sequence[Payload], *, keep: bool, within_s: float = 600.0
    ) -> HostVersion:
        """Pull a version by this route. Its base copy is consumed; `keep` keeps the new one."""
        if self._closed:
            raise RefusedError("this worker is closing and pulls no more versions")
        try:
            channel = self._send_request(version, route, keep, within_s)
            body, descriptor = _receive_reply(channel)
            reply = protocol.decode_reply(body)
            if isinstance(reply, protocol.Success):
                pulled = msgspec.convert(reply.value, PulledVersion)
                return self._map_version(version, descriptor, pulled, keep=keep)
        except (OSError, UnavailableError, msgspec.MsgspecError) as error:
            status = self._end()
            raise UnavailableError(
                f"the process that pulled {version!r} ended with {status} ({error}); the next "
                "pull starts another"
            ) from None
        raise reply.error()

    def close(self) -> None:
        """End the process; a running pull fails."""
        self._closed = True
        self._end()

    def _send_request(
        self, version: str, route: Sequence[Payload], keep: bool, within_s: float
    ) -> socket.socket:
        """Send a request to the process; starts another one if it has ended since the last pull."""
        for last in (False, True):
            channel = self._ensure_started()
            protocol.limit_silence(channel, within_s + _LATE_S)
            self._mapped_versions = {
                name: held for name, held in self._mapped_versions.items() if held() is not None
            }
            try:
                protocol.send(
                    channel,
                    PullRequest(
                        version, tuple(route), keep, within_s, tuple(self._mapped_versions)
                    ),
                )
                break
            except OSError:
                if last:
                    raise
                logger.warning("the process that pulls ended with %s", self._end())
        return channel

    def _map_version(
        self, version: str, descriptor: int | None, pulled: PulledVersion, *, keep: bool
    ) -> HostVersion:
        def allocate(size: int) -> memoryview:
            if size == 0:
                return memoryview(b"")
            if descriptor is None:
                raise UnavailableError("it sent no memory")
            try:
                memory = map_shared(descriptor, size)
            finally:
                os.close(descriptor)
            if keep:
                assert isinstance(memory.obj, mmap.mmap)
                self._mapped_versions[version] = weakref.ref(memory.obj)
            return memory

        arrays = tensor_memory((tensor.size for tensor in pulled.tensors), allocate)
        return HostVersion(version, pulled.tensors, arrays, pulled.meta)

    def _ensure_started(self) -> socket.socket:
        """The channel to the process; starts it if none runs."""
        if self._channel is None:
            self._mapped_versions.clear()
            self._channel, theirs = socket.socketpair()
            with theirs:
                self._process = self._start(theirs)
        return self._channel

    def _start(self, channel: socket.socket) -> subprocess.Popen[bytes]:
        module, descriptor = "slackwater.weights.relay.pull_process", channel.fileno()
        command = [sys.executable, "-m", module, str(descriptor), *self._arguments]
        if has_one_thread():
            pull = partial(_pull_for, channel, self._secret, *self._arguments)
            return fork(pull, command, [descriptor])
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            env=os.environ | {SECRET: self._secret.decode()},
        )

    def _end(self) -> int | None:
        """End the process, if any; returns its exit status."""
        process, channel = self._process, self._channel
        self._process = self._channel = None
        if channel is not None:
            with suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits on it
            channel.close()
        if process is None:
            return None
        try:
            return process.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _receive_reply(channel: socket.socket) -> tuple[bytes, int | None]:
    """A reply and its descriptor, usually in one call: each further one waits for the GIL."""
    data, descriptors, _, _ = socket.recv_fds(channel, _REPLY_BYTES, 1)
    if len(data) < LENGTH.size:
        raise UnavailableError("it closed its end")
    (length,) = LENGTH.unpack_from(data)
    body = bytearray(length)
    came = len(data) - LENGTH.size
    body[:came] = data[LENGTH.size :]
    receive_into(channel, memoryview(body)[came:])
    return bytes(body), descriptors[0] if descriptors else None


def _reply(channel: socket.socket, reply: protocol.Reply, descriptor: int | None = None) -> None:
    body = msgspec.msgpack.encode(reply)
    data = LENGTH.pack(len(body)) + body
    sent = socket.send_fds(channel, [data], [] if descriptor is None else [descriptor])
    channel.sendall(data[sent:])


def _listen(channel: socket.socket, requests: "queue.SimpleQueue[PullRequest]") -> None:
    """Read requests; exit at once when the caller is gone."""
    decode = msgspec.msgpack.Decoder(PullRequest).decode
    try:
        while (body := receive_message(channel)) is not None:
            requests.put(decode(body))
    finally:
        os._exit(0)


def _serve(channel: socket.socket, receiver: Receiver) -> None:
    requests: queue.SimpleQueue[PullRequest] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, requests), daemon=True).start()
    in_use: dict[str, HostVersion] = {}  # versions that the caller still reads
    while True:
        request = requests.get()
        in_use = {name: held for name, held in in_use.items() if name in request.reading}
        try:
            found = receiver.take(
                request.version, request.route, keep=request.keep, within_s=request.within_s
            )
        except (SlackwaterError, OSError) as error:
            _reply(channel, protocol.Failure(type(error).__name__, str(error)))
            continue
        pulled = PulledVersion(found.tensors, dict(found.meta))
        _reply(channel, protocol.Success(pulled), _descriptor(found))
        if request.keep:
            in_use[request.version] = found
        del found  # with a reference here the receiver would copy it before the next delta


def _descriptor(found: HostVersion) -> int | None:
    """The descriptor of the memory that holds all tensors; None if they are empty."""
    for array in found.arrays:
        if len(array):
            return descriptor_of(array)
    return None


def _load_codec() -> None:
    """Load the codec's compiled loops before the first pull needs them."""
    for kind in (np.uint16, np.uint32):
        old, new = np.zeros(256, kind), np.arange(256, dtype=kind)
        apply(old, encode(old.copy(), new))


def _pull_for(
    channel: socket.socket, secret: bytes, host: str, port: str, node: str, keep: str
) -> None:
    """Serve one caller until its end of the channel closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the caller, which ends us
    _load_codec()
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    reader = RelayReader((host, int(port)), secret, node=node)
    _serve(channel, Receiver(reader, keep=int(keep), allocate=allocate_shared))


def main() -> None:
    descriptor, *arguments = sys.argv[1:]
    secret = os.environ[SECRET].encode()
    _pull_for(socket.socket(fileno=int(descriptor)), secret, *arguments)


if __name__ == "__main__":
    main()
