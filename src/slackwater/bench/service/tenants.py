"""What a quiet tenant's requests take while a loud one does its worst: alone, then beside each attack.

One service in a process of its own, two tenants. The quiet one asks for one short completion after the other; the
loud one keeps the service busy with long prompts, many choices, large bodies or training batches all the while.
Reported: p50 and p99 alone and beside each attack, their ratio, and how many quiet requests failed (none may).
"""

import json
import multiprocessing
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from slackwater.bench.options import BenchOptions
from slackwater.model.errors import UnavailableError

_QUIET_BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0}
_READY_S = 120.0


class TwoTenants:
    """A service with a `quiet` and a `loud` tenant."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        command = [sys.executable, "-m", "slackwater", "up", "--state", str(folder), "--port", "0"]
        command += ["--model", f"tiny={model}", "--tenant", "quiet", "--tenant", "loud"]
        with (folder / "up.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def __enter__(self) -> "TwoTenants":
        deadline_s = time.monotonic() + _READY_S
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                raise UnavailableError((self._folder / "up.log").read_text())
            if self._serves():
                return self
            time.sleep(0.1)
        raise UnavailableError(f"the service was not ready after {_READY_S:g} s")

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    def _serves(self) -> bool:
        found = self._folder / "server.json"
        if not found.is_file():
            return False
        self.url = json.loads(found.read_text())["url"]
        try:
            return httpx.get(f"{self.url}/healthz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def key(self, tenant: str) -> str:
        keys: dict[str, str] = json.loads((self._folder / "keys.json").read_text())
        return next(key for key, name in keys.items() if name == tenant)

    def client(self, tenant: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.key(tenant)}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=300)


def latencies(client: httpx.Client, requests: int) -> tuple[list[float], int]:
    """Seconds of each of the quiet tenant's requests, and how many were not answered."""
    taken_s, failed = [], 0
    for _ in range(requests):
        began_s = time.perf_counter()
        answer = client.post("/v1/completions", json=_QUIET_BODY)
        taken_s.append(time.perf_counter() - began_s)
        failed += answer.status_code != 200
    return taken_s, failed


class Attack:
    """The same requests again and again, on a few threads of a process of its own, until it is over."""

    def __init__(self, service: TwoTenants, name: str) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._began = spawning.Event()
        address = (service.url, service.key("loud"))
        self._process = spawning.Process(target=attack, args=(name, *address, self._began))

    def __enter__(self) -> "Attack":
        self._process.start()
        if not self._began.wait(60):
            raise UnavailableError("the loud tenant did not begin within 60 s")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join(60)


def attack(name: str, url: str, key: str, began: Any) -> None:
    """What the loud tenant does, for as long as it lives."""
    make, threads = ATTACKS[name]
    send = make()

    def repeat() -> None:
        headers = {"authorization": f"Bearer {key}"}
        with httpx.Client(base_url=url, headers=headers) as client:
            while True:
                try:
                    send(client)
                except httpx.HTTPError:
                    time.sleep(0.01)
                began.set()

    for _ in range(threads):
        threading.Thread(target=repeat).start()


def _completion(prompt: Any, **more: Any) -> Callable[[httpx.Client], Any]:
    body = json.dumps({"model": "tiny", "prompt": prompt, **more}).encode()
    headers = {"content-type": "application/json"}

    def send(client: httpx.Client) -> Any:
        # It leaves before long answers come: what it started must stop, too.
        return client.post("/v1/completions", content=body, headers=headers, timeout=2)

    return send


def _chat(content: str) -> Callable[[httpx.Client], Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return lambda client: client.post("/v1/chat/completions", json=body, timeout=30)


def _batch(megabytes: int) -> Callable[[httpx.Client], Any]:
    """A training batch for a model that is not there: it is read before that is found out."""
    from slackwater.serve.tinker.proto import MEDIA_TYPE, pb

    message = pb.ForwardBackwardRequest(model_id="nobody", seq_id=1, loss_fn="cross_entropy")
    for _ in range(megabytes):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = bytes(1 << 20)
    body = message.SerializeToString()
    headers = {"content-type": MEDIA_TYPE}
    return lambda client: client.post(
        "/api/v1/forward_backward", content=body, headers=headers, timeout=60
    )


ATTACKS: dict[str, tuple[Callable[[], Callable[[httpx.Client], Any]], int]] = {
    "text_16_mb": (lambda: _completion("a b " * (4 << 20), max_tokens=1), 2),
    "text_at_the_limit": (lambda: _completion(["a b c d " * 2000] * 200, max_tokens=1), 4),
    "choices_128000": (lambda: _completion(["a"] * 1000, n=128), 4),
    "choices_4000_long": (lambda: _completion(["a"] * 1000, n=4, max_tokens=1000), 4),
    "tokens_2_mb": (lambda: _completion([7] * 600_000), 8),
    "chat_at_the_limit": (lambda: _chat("a b c " * 2500), 4),
    "batches_32_mb": (lambda: _batch(32), 3),
}


def run(options: BenchOptions) -> dict[str, float]:
    """p50 and p99 of the quiet tenant, alone and beside each attack."""
    from slackwater.zoo.tiny import make_model

    requests = 30 if options.quick else 200
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="slackwater-tenants-") as folder:
        make_model("tiny", Path(folder) / "tiny", seed=options.seed)
        state = Path(folder) / "state"
        state.mkdir()
        with TwoTenants(state, Path(folder) / "tiny") as service, service.client("quiet") as quiet:
            latencies(quiet, 10)
            alone_s, failed = latencies(quiet, requests)
            p99_alone_s = _note(figures, "alone", alone_s)
            worst = 0.0
            for place, name in enumerate(ATTACKS):
                options.progress(name, place / len(ATTACKS))
                with Attack(service, name):
                    taken_s, missed = latencies(quiet, requests)
                ratio = _note(figures, name, taken_s) / p99_alone_s
                figures[f"{name}_p99_ratio"] = ratio
                worst, failed = max(worst, ratio), failed + missed
    figures["worst_p99_ratio"] = worst
    figures["quiet_requests_failed"] = float(failed)
    return figures


def _note(figures: dict[str, float], name: str, taken_s: list[float]) -> float:
    for share in (50, 99):
        figures[f"{name}_p{share}_ms"] = float(np.percentile(taken_s, share)) * 1e3
    return float(np.percentile(taken_s, 99))
