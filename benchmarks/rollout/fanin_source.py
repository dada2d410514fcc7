"""The sending side of `bench fanin`, in a process of its own.

    python -m benchmarks.rollout.fanin_source frames HOST:PORT TURNS TOKENS CONNECTIONS
    python -m benchmarks.rollout.fanin_source sse PORT TURNS TOKENS
    python -m benchmarks.rollout.fanin_source paced_sse PORT TURNS EVENTS_PER_S LONGEST

The first connects as engines and the second serves streams, both faster than any receiver: one
round of all turns after the other, encoded before it is timed, so that only the receiver's work is
measured. The third serves streams that end at random, one event at a time.
"""

import contextlib
import json
import os
import socket
import sys

import numpy as np

from benchmarks.rollout.paced_engines import (
    BASE_MODEL,
    LOGPROB,
    SECRET_VARIABLE,
    WireEngine,
    length_of,
    run_paced,
    token_at,
)
from slackwater.wire import messages
from slackwater.wire.tokens import TokenColumns, TurnFinished, encode_tokens

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class FrameEngine(WireEngine):
    """Takes its turns in, then streams them all."""

    def __init__(self, name: str, address: tuple[str, int], turns: int) -> None:
        super().__init__(name, address, os.environ[SECRET_VARIABLE], turns, BASE_MODEL)
        self._turns = turns
        self.requests: list[messages.Generate] = []

    def take_turns(self) -> None:
        """Answer pulls until all turns have come."""
        while len(self.requests) < self._turns:
            found = self.receive()
            self.requests += [each for each in found if isinstance(each, messages.Generate)]

    def frame(self, position: int) -> bytes:
        count = len(self.requests)
        columns = TokenColumns(
            np.array([request.request for request in self.requests], np.uint32),
            np.full(count, token_at(position), np.uint32),
            np.full(count, LOGPROB, np.float32),
        )
        return encode_tokens(columns)

    def finish(self, tokens: int) -> None:
        """End every turn."""
        ends = [TurnFinished(r.request, "length", tokens, r.version) for r in self.requests]
        self.send(encode_tokens(TokenColumns([], [], [], finished=ends)))

    def leave(self) -> None:
        """Wait for the receiver to hang up."""
        self._socket.settimeout(60)
        with contextlib.suppress(ConnectionError):
            while self._socket.recv(1 << 18):
                pass


def send_frames(connect: str, turns: int, tokens: int, connections: int) -> None:
    host, _, port = connect.rpartition(":")
    engines = [
        FrameEngine(f"source-{number}", (host, int(port)), turns // connections)
        for number in range(connections)
    ]
    for engine in engines:
        engine.take_turns()
    kinds = [[engine.frame(position) for position in range(7)] for engine in engines]
    for position in range(tokens):
        for engine, frames in zip(engines, kinds, strict=True):
            engine.send(frames[position % 7])
    for engine in engines:
        engine.finish(tokens)
    for engine in engines:
        engine.leave()


def _event(position: int) -> bytes:
    """One chunk of a streamed completion, as servers with this API send it, without what nobody
    reads.
    """
    choice = {
        "index": 0,
        "text": "",
        "token_ids": [token_at(position)],
        "logprobs": {"token_logprobs": [LOGPROB]},
        "finish_reason": None,
    }
    return _chunk(b"data: " + json.dumps({"id": "cmpl-0", "choices": [choice]}).encode() + b"\n\n")


def _chunk(line: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(line), line)


_DONE = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def serve_sse(port: int, turns: int, tokens: int) -> None:
    streams = _accept(port, turns)
    for stream in streams:
        request = b""
        while b"\r\n\r\n" not in request:
            request += stream.recv(1 << 16)
        stream.sendall(_HEAD)
    events = [_event(position) for position in range(7)]
    for position in range(tokens):
        for stream in streams:
            stream.sendall(events[position % 7])
    for stream in streams:
        stream.sendall(_DONE)
    for stream in streams:
        stream.recv(1)


def _accept(port: int, connections: int) -> list[socket.socket]:
    with socket.create_server(("127.0.0.1", port), backlog=connections) as server:
        sys.stdout.write("listening\n")
        sys.stdout.flush()
        found = [server.accept()[0] for _ in range(connections)]
    for connection in found:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


class PacedStream:
    """One connection: streams the answer of a request event by event, then waits for the next."""

    def __init__(self, connection: socket.socket, events: list[bytes], longest: int) -> None:
        self._connection, self._events, self._longest = connection, events, longest
        self._request = b""
        self._position = self._length = 0

    def fileno(self) -> int:
        return self._connection.fileno()

    def take_messages(self) -> None:
        data = self._connection.recv(1 << 16)
        if not data:
            raise ConnectionError("the receiver closed the connection")
        self._request += data
        _, _, body = self._request.partition(b"\r\n\r\n")
        if not body.endswith(b"}"):
            return
        self._request = b""
        self._position, self._length = 0, length_of(json.loads(body)["seed"], self._longest)
        self._connection.sendall(_HEAD)

    def step(self) -> None:
        if self._position == self._length:
            return
        event = self._events[self._position % len(self._events)]
        self._position += 1
        self._connection.sendall(event + (_DONE if self._position == self._length else b""))


def serve_paced_sse(port: int, turns: int, events_per_s: float, longest: int) -> None:
    events = [_event(position) for position in range(7)]
    streams = [PacedStream(each, events, longest) for each in _accept(port, turns)]
    with contextlib.suppress(ConnectionError):
        run_paced(streams, events_per_s)


if __name__ == "__main__":
    if sys.argv[1] == "frames":
        send_frames(sys.argv[2], *map(int, sys.argv[3:6]))
    elif sys.argv[1] == "sse":
        serve_sse(*map(int, sys.argv[2:5]))
    else:
        serve_paced_sse(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
