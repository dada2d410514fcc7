"""What a quiet tenant's requests take while a loud one does its worst: alone, and beside each attack.

One service in a process of its own, two tenants. The quiet one asks for one short completion after the other; the
loud one keeps the service busy with long prompts, many choices, large bodies or training batches all the while. What is measured is the service's
fairness, so the loud tenant's client, which would be on another machine, has the least priority here. Each attack is measured in several
rounds, with the quiet tenant alone before each, after the service has come to rest: a machine that does other things meanwhile slows both.

`<attack>_p50_ms`, `_p99_ms` and the same of `<attack>_alone`, over all rounds; `_p99_ratio` is one over the other. What does not hang on the
machine's load: `_loop_longest_cpu_ms`, the longest time that the event loop was held, in processor time; `_service_cpu_share`, the processor time that
the service took per second; and `engine_*`, what an engine's shares do (`engine_shares.py`). `quiet_requests_failed` must be 0.
"""

import json
import multiprocessing
import os
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
from slackwater.bench.service.engine_shares import engine_shares
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

    def gauge(self, name: str) -> float:
        """One of the service's own figures, from `/metrics`."""
        with self.client("quiet") as client:
            lines = client.get("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    def cpu_s(self) -> float:
        """Processor time of the service's process so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rest(self, limit_s: float = 60.0) -> None:
        """Until it does next to nothing, or for as long as it may take."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            before_s = self.cpu_s()
            time.sleep(0.25)
            if self.cpu_s() - before_s < 0.05:
                return

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
    os.nice(19)
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

    rounds, requests = (2, 15) if options.quick else (5, 60)
    figures: dict[str, float] = {"rounds": rounds, "requests_each": requests}
    with tempfile.TemporaryDirectory(prefix="slackwater-tenants-") as folder:
        make_model("tiny", Path(folder) / "tiny", seed=options.seed)
        figures.update(engine_shares(Path(folder) / "tiny", rounds * requests))
        state = Path(folder) / "state"
        state.mkdir()
        with TwoTenants(state, Path(folder) / "tiny") as service, service.client("quiet") as quiet:
            latencies(quiet, 10)
            seen: dict[str, _Rounds] = {name: _Rounds() for name in ATTACKS}
            for number in range(rounds):
                for place, name in enumerate(ATTACKS):
                    done = (number + place / len(ATTACKS)) / rounds
                    options.progress(f"{name}, round {number + 1} of {rounds}", done)
                    seen[name].measure(service, quiet, name, requests)
    for name, one in seen.items():
        figures.update(one.figures(name))
    figures["worst_p99_ratio"] = max(figures[f"{name}_p99_ratio"] for name in ATTACKS)
    figures["quiet_requests_failed"] = float(sum(one.failed for one in seen.values()))
    return figures


class _Rounds:
    """The rounds of one attack, together."""

    def __init__(self) -> None:
        self.failed = 0
        self._alone_s: list[float] = []
        self._beside_s: list[float] = []
        self._held_cpu_s = self._cpu_s = self._took_s = 0.0

    def measure(self, service: TwoTenants, quiet: httpx.Client, name: str, requests: int) -> None:
        service.rest()
        alone_s, missed = latencies(quiet, requests)
        self._alone_s += alone_s
        cpu_s, began_s = service.cpu_s(), time.monotonic()
        with Attack(service, name):
            beside_s, missed_beside = latencies(quiet, requests)
            held_s = service.gauge("slackwater_loop_longest_cpu_s")
        self._held_cpu_s = max(self._held_cpu_s, held_s)
        self._took_s += time.monotonic() - began_s
        self._cpu_s += service.cpu_s() - cpu_s
        self._beside_s += beside_s
        self.failed += missed + missed_beside

    def figures(self, name: str) -> dict[str, float]:
        found = {
            f"{name}_p99_ratio": _percentile(self._beside_s, 99) / _percentile(self._alone_s, 99),
            f"{name}_p50_ratio": _percentile(self._beside_s, 50) / _percentile(self._alone_s, 50),
            f"{name}_loop_longest_cpu_ms": self._held_cpu_s * 1e3,
            f"{name}_service_cpu_share": self._cpu_s / self._took_s,
        }
        for key, taken_s in ((f"{name}_alone", self._alone_s), (name, self._beside_s)):
            for share in (50, 99):
                found[f"{key}_p{share}_ms"] = _percentile(taken_s, share) * 1e3
        return found


def _percentile(taken_s: list[float], share: int) -> float:
    return float(np.percentile(taken_s, share))
