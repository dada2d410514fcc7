"""The sending side of `bench fanin`, in a process of its own, faster than any receiver.

    python -m benchmarks.rollout.fanin_source frames HOST:PORT TURNS TOKENS CONNECTIONS
    python -m benchmarks.rollout.fanin_source sse PORT TURNS TOKENS

The first connects as engines, the second serves 256 streams.

Both send the same tokens, one round of all turns after the other, as engine steps make them. What
is sent is encoded before it is timed, so that only the receiver's work is measured.
"""

import contextlib
import json
import os
import socket
import sys

import numpy as np

from slackwater.wire import messages
from slackwater.wire.frames import FrameDecoder
from slackwater.wire.tokens import TokenColumns, TurnFinished, encode_tokens
from slackwater.worker.connection import shake_hands

LOGPROB = -1.5
SECRET_VARIABLE = "SLACKWATER_WORKER_SECRET"
BASE_MODEL = "fanin"


def token_at(position: int) -> int:
    """What every turn gets at a position: all there is to check on arrival."""
    return 1000 + position % 7


class FrameEngine:
    """One connection that plays an engine: takes its turns in, then streams them all."""

    def __init__(self, name: str, address: tuple[str, int], turns: int) -> None:
        self._socket = socket.create_connection(address, timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._decoder = FrameDecoder()
        self._turns = turns
        self.requests: list[messages.Generate] = []
        facts = messages.EngineFacts(
            base_model=BASE_MODEL,
            max_running=turns,
            max_context_tokens=1 << 20,
            kv_tokens=1 << 30,
            max_versions=1,
        )
        hello = messages.Hello(name, "engine", facts)
        shake_hands(self._socket, hello, os.environ[SECRET_VARIABLE], self._decoder)

    def take_turns(self) -> None:
        """Answer pulls until all turns have come."""
        while len(self.requests) < self._turns:
            data = self._socket.recv(1 << 18)
            if not data:
                raise ConnectionError("the receiver closed the connection")
            for frame in self._decoder.feed(data):
                message = messages.decode_to_worker(frame.body)
                if isinstance(message, messages.PullVersion):
                    self._socket.sendall(messages.encode(messages.VersionReady(message.version)))
                elif isinstance(message, messages.Generate):
                    self.requests.append(message)

    def frame(self, position: int) -> bytes:
        count = len(self.requests)
        columns = TokenColumns(
            np.array([request.request for request in self.requests], np.uint32),
            np.full(count, token_at(position), np.uint32),
            np.full(count, LOGPROB, np.float32),
        )
        return encode_tokens(columns)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def finish(self, tokens: int) -> None:
        """End every turn."""
        ends = [TurnFinished(r.request, "length", tokens, r.version) for r in self.requests]
        self._socket.sendall(encode_tokens(TokenColumns([], [], [], finished=ends)))

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
    line = b"data: " + json.dumps({"id": "cmpl-0", "choices": [choice]}).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(line), line)


def serve_sse(port: int, turns: int, tokens: int) -> None:
    with socket.create_server(("127.0.0.1", port), backlog=turns) as server:
        sys.stdout.write("listening\n")
        sys.stdout.flush()
        streams = [server.accept()[0] for _ in range(turns)]
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    for stream in streams:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = b""
        while b"\r\n\r\n" not in request:
            request += stream.recv(1 << 16)
        stream.sendall(head)
    events = [_event(position) for position in range(7)]
    for position in range(tokens):
        for stream in streams:
            stream.sendall(events[position % 7])
    done = b"data: [DONE]\n\n"
    for stream in streams:
        stream.sendall(b"%x\r\n%s\r\n0\r\n\r\n" % (len(done), done))
    for stream in streams:
        stream.recv(1)


if __name__ == "__main__":
    if sys.argv[1] == "frames":
        send_frames(sys.argv[2], *map(int, sys.argv[3:6]))
    else:
        serve_sse(*map(int, sys.argv[2:5]))
