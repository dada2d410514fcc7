"""SIGKILL of front ends under load: nothing acknowledged is lost, and another one serves."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from harness.ports import free_port

from .service_process import ServiceProcess, gone, wait_for

pytestmark = pytest.mark.process

CLIENTS, EACH, KILLS = 4, 6, 3
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [65, 66, 67]}]}


@pytest.fixture
def service(tiny_model: Path, tmp_path: Path) -> Iterator[ServiceProcess]:
    made = ServiceProcess(tmp_path / "state", tiny_model, free_port(), "--front-ends", "2")
    made.start()
    made.wait_for_workers()
    yield made
    made.stop()


def front_ends(service: ServiceProcess) -> list[int]:
    assert service.process is not None
    found: list[int] = []
    for child in psutil.Process(service.process.pid).children():
        with contextlib.suppress(psutil.Error):  # it has ended
            if "slackwater.serve.front" in child.cmdline():
                found.append(child.pid)
    return found


# One for all, since making one reads every certificate; a connection each, since they are cut.
HTTP = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))


def post(service: ServiceProcess, path: str, body: dict[str, object]) -> httpx.Response:
    return HTTP.post(f"{service.url}{path}", json=body, headers={"x-api-key": service.key})


class Samplers:
    """Clients that ask again, under the same number, whenever a connection breaks."""

    def __init__(self, service: ServiceProcess) -> None:
        self._service = service
        said = {"tags": [], "sdk_version": "0"}
        session = post(service, "/api/v1/create_session", {**said}).json()["session_id"]
        opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        made = post(service, "/api/v1/create_sampling_session", opened).json()
        self._sampling_session = made["sampling_session_id"]
        self.acknowledged: dict[int, str] = {}
        self.broken = 0

    def has(self, more_than: int) -> bool:
        return len(self.acknowledged) > more_than

    def ask(self, client: int) -> None:
        for seq in range(client, CLIENTS * EACH, CLIENTS):
            body = {
                "prompt": PROMPT,
                "num_samples": 1,
                "sampling_params": {"max_tokens": 32, "seed": seq, "stop": []},
                "sampling_session_id": self._sampling_session,
                "seq_id": seq,
            }
            while seq not in self.acknowledged:
                try:
                    answer = post(self._service, "/api/v1/asample", {**body})
                except httpx.TransportError:
                    self.broken += 1
                    continue
                assert answer.status_code == 200, answer.text
                self.acknowledged[seq] = answer.json()["request_id"]

    def result(self, request: str) -> httpx.Response:
        while True:
            try:
                found = post(self._service, "/api/v1/retrieve_future", {"request_id": request})
            except httpx.TransportError:
                continue
            if found.status_code != 408:
                return found


def streams(service: ServiceProcess, enough: threading.Event) -> list[str]:
    """How streams ended, one after another."""
    ended: list[str] = []
    body = {"model": "tiny", "prompt": "a", "max_tokens": 60, "stream": True, "ignore_eos": True}
    while not enough.is_set():
        try:
            answer = post(service, "/v1/completions", {**body})
        except httpx.TransportError:
            ended.append("cut")
            continue
        assert answer.status_code == 200, answer.text
        ended.append("whole" if answer.text.rstrip().endswith("[DONE]") else answer.text)
    return ended


def kill_one(service: ServiceProcess, place: int) -> None:
    """Kill a front end, and wait for the one that follows it."""
    before = front_ends(service)
    os.kill(before[place], signal.SIGKILL)
    wait_for("its end", partial(gone, before[place]))
    wait_for("another", lambda: len(set(front_ends(service)) - set(before)) == 1)


@pytest.mark.timeout(600)
def test_what_was_acknowledged_survives_its_front_end(service: ServiceProcess) -> None:
    samplers, enough = Samplers(service), threading.Event()
    wait_for("both front ends", lambda: len(front_ends(service)) == 2)
    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        streaming = pool.submit(streams, service, enough)
        try:
            asking = [pool.submit(samplers.ask, client) for client in range(CLIENTS)]
            for kills in range(KILLS):
                wait_for("progress", partial(samplers.has, kills * EACH))
                kill_one(service, kills % 2)
            for task in asking:
                task.result(timeout=300)
        finally:
            enough.set()
        ended = streaming.result(timeout=120)
    assert len(set(samplers.acknowledged.values())) == CLIENTS * EACH
    for request in samplers.acknowledged.values():
        found = samplers.result(request)
        assert found.status_code == 200, found.text
        assert b"error" not in found.content
    assert set(ended) <= {"whole", "cut"}
    wait_for("no turn", lambda: service.status()["gauges"]["rollout_live_turns"] == 0)


def half_a_batch(service: ServiceProcess) -> socket.socket:
    """A connection that sends half of a large body."""
    head = (
        "POST /api/v1/forward_backward HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        f"x-api-key: {service.key}\r\ncontent-type: application/x-protobuf\r\n"
        f"content-length: {1 << 20}\r\n\r\n"
    )
    address = urlsplit(service.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=60)
    connection.sendall(head.encode() + bytes(1 << 19))
    return connection


@pytest.mark.timeout(600)
def test_the_bodies_of_a_killed_front_end_are_removed(service: ServiceProcess) -> None:
    folder = (service.state / "sockets").resolve()
    writers: set[int] = set()
    with contextlib.ExitStack() as uploads:

        def begun() -> bool:
            # Another one each time: a front end gives up what does not go on.
            uploads.enter_context(half_a_batch(service))
            writers.update(int(body.name.split("-")[1]) for body in folder.glob("body-*"))
            return bool(writers)

        wait_for("a body's file", begun)
        killed = writers.pop()
        assert killed in front_ends(service)
        os.kill(killed, signal.SIGKILL)
        wait_for("its removal", lambda: not any(folder.glob(f"body-{killed}-*")))
    wait_for("another front end", lambda: len(set(front_ends(service)) - {killed}) == 2)
    assert post(service, "/v1/completions", {"model": "tiny", "prompt": "a"}).status_code == 200
