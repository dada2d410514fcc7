"""Engines that speak the wire protocol and compute nothing: at a fixed pace each sends one frame
with a token of every turn that it has.

    python -m benchmarks.rollout.paced_engines HOST:PORT ENGINES SLOTS STEPS_PER_S LONGEST

A turn's length follows from its seed (`length_of`) and its tokens from their positions
(`token_at`), so that whoever gets the turn can tell whether anything is missing.
"""

import os
import random
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from slackwater.wire import messages
from slackwater.wire.frames import FrameDecoder
from slackwater.wire.tokens import TokenColumns, TurnFinished, encode_tokens
from slackwater.worker.connection import shake_hands

SECRET_VARIABLE = "SLACKWATER_WORKER_SECRET"
BASE_MODEL = "fanin"
LOGPROB = -1.5
_PERIOD = 7  # of the tokens
_FIRST_TOKEN = 97
_SHORTEST_SHARE = 7  # the shortest turn is this fraction of the longest
_BEAT_STEPS = 12
_READ_BYTES = 1 << 18


def token_at(position: int) -> int:
    """The token of every turn at a position: a letter in a model of bytes."""
    return _FIRST_TOKEN + position % _PERIOD


def length_of(seed: int, longest: int) -> int:
    """How many tokens a turn has: uniform up to the longest."""
    return random.Random(seed).randint(max(longest // _SHORTEST_SHARE, 1), longest)


class Paced(Protocol):
    """A connection that sends at a pace."""

    def fileno(self) -> int: ...
    def take_messages(self) -> None:
        """Take in what has arrived; ConnectionError at the end."""
        ...

    def step(self) -> None:
        """Send what one step brings."""
        ...


class WireConnection:
    """A worker's connection, whose key it proves; it may send and receive from then on."""

    def __init__(self, address: tuple[str, int], key: str, hello: messages.Hello) -> None:
        self._socket = socket.create_connection(address, timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._decoder = FrameDecoder()
        shake_hands(self._socket, hello, key, self._decoder)

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> list[messages.ToWorker]:
        """Wait for messages; ConnectionError at the end."""
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionError("the receiver closed the connection")
        return [messages.decode_to_worker(frame.body) for frame in self._decoder.feed(data)]

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)


class WireEngine(WireConnection):
    """The connection of one engine, which has every version at once."""

    def __init__(
        self, name: str, address: tuple[str, int], key: str, slots: int, base_model: str
    ) -> None:
        facts = messages.EngineFacts(
            base_model=base_model,
            max_running=slots,
            max_context_tokens=1 << 20,
            kv_tokens=1 << 30,
            max_versions=1,
        )
        super().__init__(address, key, messages.Hello(name, "engine", facts))

    def receive(self) -> list[messages.ToWorker]:
        found = super().receive()
        for message in found:
            if isinstance(message, messages.PullVersion):
                self.send(messages.encode(messages.VersionReady(message.version)))
        return found


class PacedEngine(WireEngine):
    """Samples one token of each of its turns in a step, without computing it."""

    def __init__(
        self,
        name: str,
        address: tuple[str, int],
        key: str,
        slots: int,
        *,
        longest: int,
        base_model: str = BASE_MODEL,
    ) -> None:
        super().__init__(name, address, key, slots, base_model)
        self._longest = longest
        self._versions: list[str] = []
        self._requests: NDArray[np.uint32] = np.empty(0, np.uint32)
        self._positions: NDArray[np.int64] = np.empty(0, np.int64)
        self._lengths: NDArray[np.int64] = np.empty(0, np.int64)
        self._steps = self._produced = 0

    def take_messages(self) -> None:
        """Take in what has arrived; waits if nothing has."""
        for message in self.receive():
            if isinstance(message, messages.Generate):
                self._begin(message)
            elif isinstance(message, messages.Abort):
                self._keep(self._requests != message.request)

    def step(self) -> None:
        """Send a token of each turn, and the ends of those that are complete."""
        self._steps += 1
        frames = [self._heartbeat()] if self._steps % _BEAT_STEPS == 0 else []
        if count := len(self._requests):
            tokens = (_FIRST_TOKEN + self._positions % _PERIOD).astype(np.uint32)
            self._positions += 1
            self._produced += count
            over = self._positions >= self._lengths
            columns = TokenColumns(
                self._requests,
                tokens,
                np.full(count, LOGPROB, np.float32),
                finished=[self._finished(row) for row in np.flatnonzero(over).tolist()],
            )
            frames.append(encode_tokens(columns))
            if columns.finished:
                self._keep(~over)
        if frames:
            self.send(b"".join(frames))

    def _begin(self, message: messages.Generate) -> None:
        position = len(message.generated) // 4
        length = max(length_of(message.sampling.seed, self._longest), position + 1)
        self._requests = np.append(self._requests, np.uint32(message.request))
        self._positions = np.append(self._positions, position)
        self._lengths = np.append(self._lengths, length)
        self._versions.append(message.version)

    def _finished(self, row: int) -> TurnFinished:
        request, total = int(self._requests[row]), int(self._lengths[row])
        return TurnFinished(request, "stop", total, self._versions[row])

    def _keep(self, rows: NDArray[np.bool_]) -> None:
        self._versions = [name for name, kept in zip(self._versions, rows, strict=True) if kept]
        self._requests = self._requests[rows]
        self._positions = self._positions[rows]
        self._lengths = self._lengths[rows]

    def _heartbeat(self) -> bytes:
        gauges = {"running": float(len(self._requests)), "produced_tokens": float(self._produced)}
        return messages.encode(messages.Heartbeat(gauges))


def run_paced(senders: Sequence[Paced], steps_per_s: float) -> None:
    """Step the senders in turn, evenly over each period, until the receiver hangs up.

    Whoever is late by more than a period does not make up for it.
    """
    between_s = 1.0 / steps_per_s / len(senders)
    with selectors.DefaultSelector() as selector:
        for sender in senders:
            selector.register(sender, selectors.EVENT_READ, sender)
        next_s, number = time.monotonic(), 0
        while True:
            for key, _ in selector.select(max(next_s - time.monotonic(), 0.0)):
                key.data.take_messages()
            if (now_s := time.monotonic()) >= next_s:
                senders[number % len(senders)].step()
                number += 1
                next_s = max(next_s + between_s, now_s - len(senders) * between_s)


def main(connect: str, engines: int, slots: int, steps_per_s: float, longest: int) -> None:
    host, _, port = connect.rpartition(":")
    key = os.environ[SECRET_VARIABLE]
    paced = [
        PacedEngine(f"paced-{number}", (host, int(port)), key, slots, longest=longest)
        for number in range(engines)
    ]
    run_paced(paced, steps_per_s)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
    except ConnectionError:
        sys.exit(0)  # the receiver has all that it wanted
