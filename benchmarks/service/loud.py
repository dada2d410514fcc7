"""What a loud tenant does in `bench tenants`: attacks by name, each the same requests again and
again from a process of its own.

Plain sockets and requests that are made beforehand, since the loud tenant shares the machine with
what it attacks. It leaves before long answers come: what it started must stop, too.
"""

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from slackwater.model.errors import UnavailableError
from slackwater.runtime.priority import give_way

JSON = "application/json"
_BEGUN_S = 180.0


@dataclass(frozen=True, slots=True)
class Loud:
    """`bodies(url, key)` gives one body after the other for `path`; so many at once, each left
    alone after `patience_s`.
    """

    path: str
    bodies: Callable[[str, str], Iterator[bytes]]
    at_once: int
    patience_s: float = 2.0
    media_type: str = JSON


def _same(body: bytes) -> Iterator[bytes]:
    return itertools.repeat(body)


def _completion(
    prompt: Callable[[], Any], at_once: int, patience_s: float = 2.0, **more: Any
) -> Loud:
    def bodies(url: str, key: str) -> Iterator[bytes]:
        del url, key
        return _same(json.dumps({"model": "tiny", "prompt": prompt(), **more}).encode())

    return Loud("/v1/completions", bodies, at_once, patience_s)


def _chat(content: str, at_once: int) -> Loud:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    encoded = json.dumps(body).encode()
    return Loud("/v1/chat/completions", lambda url, key: _same(encoded), at_once, 30.0)


def _batches(megabytes: int, at_once: int) -> Loud:
    """Training batches for a model that is not there: they are read before that is found out."""

    def bodies(url: str, key: str) -> Iterator[bytes]:
        from slackwater.serve.tinker.proto import pb

        del url, key
        message = pb.ForwardBackwardRequest(model_id="nobody", seq_id=1, loss_fn="cross_entropy")
        for _ in range(megabytes):
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = bytes(1 << 20)
        return _same(message.SerializeToString())

    path = "/api/v1/forward_backward"
    return Loud(path, bodies, at_once, 60.0, "application/x-protobuf")


def _samples(count: int, tokens: int, at_once: int) -> Loud:
    """Through the Tinker API, from one sampling session, each with a number of its own."""

    def bodies(url: str, key: str) -> Iterator[bytes]:
        signed = {"x-api-key": key}
        with httpx.Client(base_url=f"{url}/api/v1", headers=signed, timeout=_BEGUN_S) as client:
            session = client.post("/create_session", json={"tags": [], "sdk_version": "0"})
            opened = {"session_id": session.json()["session_id"], "sampling_session_seq_id": 0}
            opened |= {"base_model": "tiny"}
            sampler = client.post("/create_sampling_session", json=opened).json()
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [97, 98, 99]}]}
        params = {"max_tokens": tokens, "stop": []}
        body = {"prompt": prompt, "num_samples": count, "sampling_params": params}
        body |= {"sampling_session_id": sampler["sampling_session_id"]}
        return (json.dumps({**body, "seq_id": number}).encode() for number in itertools.count(1))

    return Loud("/api/v1/asample", bodies, at_once, 10.0)


ATTACKS: dict[str, Loud] = {
    "text_16_mb": _completion(lambda: "a b " * (4 << 20), 2, max_tokens=1),
    "text_60_mb": _completion(lambda: "a b " * (15 << 20), 2, max_tokens=1),
    "text_at_the_limit": _completion(lambda: ["a b c d " * 2000] * 200, 4, max_tokens=1),
    "choices_128000": _completion(lambda: ["a"] * 1000, 4, n=128),
    "choices_4000_long": _completion(lambda: ["a"] * 1000, 4, n=4, max_tokens=1000),
    "tokens_2_mb": _completion(lambda: [7] * 600_000, 8),
    "chat_at_the_limit": _chat("a b c " * 2500, 4),
    "batches_32_mb": _batches(32, 3),
    "streams_1000": _completion(
        lambda: "hello", 1000, 60.0, max_tokens=1000, stream=True, ignore_eos=True
    ),
    "small_requests": _completion(lambda: "hello", 64, 30.0, max_tokens=1),
    "tinker_samples": _samples(128, 1000, 16),
}


def _actions(at_once: int, **fields: Any) -> Loud:
    """Actions, each in a job of its own and of the highest priority; none is waited for."""

    def bodies(url: str, key: str) -> Iterator[bytes]:
        del url, key
        asked = {"priority": 1000, **fields}
        return (json.dumps({**asked, "job": f"j{n}"}).encode() for n in itertools.count())

    return Loud("/slackwater/actions", bodies, at_once)


def _environments(at_once: int) -> Loud:
    def bodies(url: str, key: str) -> Iterator[bytes]:
        del url, key
        asked = {"memory_mib": 256, "priority": 1000, "wait_s": 0}
        return (json.dumps({**asked, "job": f"j{n}"}).encode() for n in itertools.count())

    return Loud("/slackwater/environments", bodies, at_once)


_SPIN = ["sh", "-c", "while :; do :; done"]
ACTION_ATTACKS: dict[str, Loud] = {
    "short_actions": _actions(16, command=["true"]),
    "long_actions": _actions(16, command=["sleep", "600"]),
    "spinning_actions": _actions(16, command=_SPIN, cores=[1, 2, 4, 8], single_core_s=0.001),
    "environments": _environments(16),
}


class Attack:
    """A loud tenant at work, while in the context."""

    def __init__(self, url: str, key: str, name: str) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._began = spawning.Event()
        self._process = spawning.Process(target=attack, args=(name, url, key, self._began))

    def __enter__(self) -> "Attack":
        self._process.start()
        if not self._began.wait(_BEGUN_S):
            self._process.kill()
            raise UnavailableError(f"the loud tenant did not begin within {_BEGUN_S:g} s")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join(60)


def attack(name: str, url: str, key: str, began: Any) -> None:
    """The attack of that name, for as long as this process lives; from its first request on it has
    the least priority, since it would be on another machine.
    """
    os.setsid()
    loud = (ATTACKS | ACTION_ATTACKS)[name]
    asyncio.run(_all_at_once(loud, url, key, loud.bodies(url, key), began))


async def _all_at_once(loud: Loud, url: str, key: str, bodies: Iterator[bytes], began: Any) -> None:
    async def repeat() -> None:
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(loud.patience_s):
                    await _send(loud, url, key, next(bodies), began)
            await asyncio.sleep(0.01)

    await asyncio.gather(*(repeat() for _ in range(loud.at_once)))


async def _send(loud: Loud, url: str, key: str, body: bytes, began: Any) -> None:
    """One request, and whatever is answered, unread."""
    address = urlsplit(url)
    head = (
        f"POST {loud.path} HTTP/1.1\r\nhost: {address.netloc}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: {loud.media_type}\r\nconnection: close\r\ncontent-length: "
        f"{len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(head.encode())
        writer.write(body)
        if not began.is_set():
            give_way(19)
            began.set()
        while await reader.read(1 << 18):
            pass
    finally:
        writer.transport.abort()
