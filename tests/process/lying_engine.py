"""An engine process that misbehaves in one way: `python lying_engine.py MODE HOST:PORT NAME`."""

import contextlib
import os
import socket
import struct
import sys
import time

import numpy as np

from slackwater.wire import messages
from slackwater.wire.frames import FrameDecoder, FrameKind, encode_frame
from slackwater.wire.tokens import TokenColumns, TurnFinished, encode_tokens
from slackwater.worker.connection import shake_hands

FACTS = messages.EngineFacts(
    base_model="policy",
    max_running=64,
    max_context_tokens=1024,
    kv_tokens=1 << 20,
    max_versions=4,
    kind="spot",
)


def tokens_frame(request: int, count: int, *finished: TurnFinished) -> bytes:
    columns = TokenColumns(
        np.full(count, request, np.uint32),
        np.full(count, 66, np.uint32),
        np.full(count, -1.0, np.float32),
        finished=finished,
    )
    return encode_tokens(columns)


def lie(mode: str, turn: messages.Generate) -> bytes:
    """What this engine answers to its first turn."""
    request, limit = turn.request, turn.sampling.max_tokens
    ended = TurnFinished(request, "length", limit, turn.version)
    match mode:
        case "garbage":
            return b"\x00not a frame at all" * 50
        case "oversize":
            return struct.pack("<2sBBI", b"SW", 1, 2, 0xFFFFFFFF)
        case "bad_rows" | "bad_endings":
            rows = 1000 if mode == "bad_rows" else 0
            return encode_frame(FrameKind.TOKENS, struct.pack("<II", rows, rows) + b"short")
        case "bad_control":
            return encode_frame(FrameKind.CONTROL, b"\xc1\xc1\xc1")
        case "truncated":
            return tokens_frame(request, 3)[:-5]
        case "foreign_ids":
            return tokens_frame(4_000_000_000, 1)
        case "too_many":
            return tokens_frame(request, limit + 1)
        case "miscounts":
            return tokens_frame(request, 1, ended)
        case "other_version":
            said = TurnFinished(request, "length", limit, "some-other-version")
            return tokens_frame(request, limit, said)
        case "unasked_version":
            return messages.encode(messages.VersionReady("never-asked-for"))
        case "wrong_scores":
            return messages.encode(messages.PromptScores(request, [None] * 9999))
    return b""  # the silent ways


def play(mode: str, peer: socket.socket, decoder: FrameDecoder) -> None:
    """Answer pulls, lie at the first turn, then hold the connection open until it is closed."""
    lied, deaf = False, False
    peer.settimeout(0.2)
    while True:
        if mode != "mute" or not lied:
            peer.sendall(messages.encode(messages.Heartbeat({"running": 1.0})))
        if deaf:
            time.sleep(0.2)
            continue
        try:
            data = peer.recv(1 << 16)
        except TimeoutError:
            continue
        if not data:
            return
        for frame in decoder.feed(data):
            message = messages.decode_to_worker(frame.body)
            if isinstance(message, messages.PullVersion):
                peer.sendall(messages.encode(messages.VersionReady(message.version)))
            elif isinstance(message, messages.Generate):
                peer.sendall(lie(mode, message))
                lied, deaf = True, mode in ("deaf", "mute")
                if mode == "truncated":
                    return


def main(mode: str, connect: str, name: str) -> None:
    host, _, port = connect.rpartition(":")
    secret = "guess" if mode == "wrong_secret" else os.environ["SLACKWATER_WORKER_SECRET"]
    decoder = FrameDecoder()
    with (
        socket.create_connection((host, int(port)), timeout=120) as peer,
        contextlib.suppress(ConnectionError),
    ):
        if mode == "no_hello":
            peer.sendall(messages.encode(messages.Heartbeat()))
        else:
            shake_hands(peer, messages.Hello(name, "engine", FACTS), secret, decoder)
        play(mode, peer, decoder)


if __name__ == "__main__":
    main(*sys.argv[1:4])
