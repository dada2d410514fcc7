"""`slackwater bench streaming`: tokens per second and time to the first token at 1, 16, 64 and 256
streaming clients.

One service with a tiny model and one engine with room for all clients; clients are real HTTP
clients in another process. `<clients>.tokens_per_s`, `.first_p50_ms`, `.first_p99_ms`. Where the
time goes: processor time per token of the service, the engine and the clients (`.service_cpu_us`,
`.engine_cpu_us`, `.client_cpu_us`), and how much of the mean time to the first token the service
had the turn in hand (`.first_in_service_ms`: from the turn's submission until its first token was
passed on); the rest is connecting, reading the request and waiting for the event loop, on either
side.

With `--before SRC` (the source folder of an older version) both are measured by the same clients in
turn, round by round: keys begin with `before.`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.options import BenchOptions
from benchmarks.processor_use import PLANE, ProcessorUse
from slackwater.model.errors import UnavailableError

CLIENTS = (1, 16, 64, 256)
_TOKENS = 32
_READY_S = 120.0
_FIRST = "slackwater_first_token_seconds"


class StreamedService:
    """`slackwater up` with a tiny model, of this version or of the one in `source`."""

    def __init__(self, folder: Path, model: Path, source: Path | None) -> None:
        self._folder = folder
        folder.mkdir()
        command = [sys.executable, "-m", "slackwater", "up", "--state", str(folder), "--port", "0"]
        command += ["--model", f"tiny={model}", "--max-running", str(max(CLIENTS))]
        self._log = folder / "up.log"
        # An older version must not find this one's modules.
        paths = {} if source is None else {"PYTHONPATH": str(source)}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=folder, env={**os.environ, **paths}
            )
        self.url = self.key = ""

    def wait(self) -> None:
        """Until a completion comes."""
        deadline_s = time.monotonic() + _READY_S
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                raise UnavailableError(self._log.read_text())
            if self._answers():
                return
            time.sleep(0.2)
        raise UnavailableError(f"the service was not ready after {_READY_S:g} s")

    def _answers(self) -> bool:
        found = self._folder / "server.json"
        if not found.is_file():
            return False
        told = json.loads(found.read_text())
        self.url, self.key = told["url"], told["key"]
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        headers = {"authorization": f"Bearer {self.key}"}
        try:
            answer = httpx.post(f"{self.url}/v1/completions", json=body, headers=headers)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    def first_token_s(self) -> tuple[float, float]:
        """Sum and count of what the service says itself of its first tokens; an older one says
        nothing.
        """
        headers = {"authorization": f"Bearer {self.key}"}
        lines = httpx.get(f"{self.url}/metrics", headers=headers).text.splitlines()
        found = {
            name: sum(float(line.split()[-1]) for line in lines if line.startswith(_FIRST + name))
            for name in ("_sum", "_count")
        }
        return found["_sum"], found["_count"]

    def cpu_s(self) -> tuple[float, float]:
        """Processor time of the service, and of all that it started."""
        used = ProcessorUse(self.process.pid).seconds()
        plane_s = used.pop(PLANE)
        return plane_s, sum(used.values())

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


class _Seen:
    """All rounds of one service with one number of clients."""

    def __init__(self) -> None:
        self.first_s: list[float] = []
        self.rates: list[float] = []
        self.failed = self.tokens = 0.0
        self.cpu_s = np.zeros(3)
        self.in_service_s = self.in_service = 0.0

    def measure(self, service: StreamedService, clients: int, requests: int) -> None:
        body = {
            **{"model": "tiny", "prompt": "hello", "max_tokens": _TOKENS, "ignore_eos": True},
            **{"stream": True, "temperature": 1.0},
        }
        options: dict[str, Any] = {"url": service.url, "key": service.key, "body": body}
        options |= {"clients": clients, "requests": requests}
        module = "benchmarks.service.stream_clients"
        before, first_before = service.cpu_s(), service.first_token_s()
        done = subprocess.run(
            [sys.executable, "-m", module, json.dumps(options)], capture_output=True, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout)
        after, first_after = service.cpu_s(), service.first_token_s()
        tokens = _TOKENS * len(found["first_s"])
        self.first_s += found["first_s"]
        self.failed += len(found["failed"])
        self.tokens += tokens
        self.rates.append(tokens / found["took_s"])
        self.cpu_s += [after[0] - before[0], after[1] - before[1], found["cpu_s"]]
        self.in_service_s += first_after[0] - first_before[0]
        self.in_service += first_after[1] - first_before[1]

    def figures(self, key: str) -> dict[str, float]:
        found = {
            f"{key}.tokens_per_s": float(np.median(self.rates)),
            f"{key}.first_p50_ms": float(np.percentile(self.first_s, 50)) * 1e3,
            f"{key}.first_p99_ms": float(np.percentile(self.first_s, 99)) * 1e3,
            f"{key}.first_mean_ms": float(np.mean(self.first_s)) * 1e3,
            f"{key}.failed": self.failed,
        }
        for who, used_s in zip(("service", "engine", "client"), self.cpu_s, strict=True):
            found[f"{key}.{who}_cpu_us"] = float(used_s) / max(self.tokens, 1) * 1e6
        if self.in_service:
            found[f"{key}.first_in_service_ms"] = self.in_service_s / self.in_service * 1e3
        return found


def run(options: BenchOptions) -> dict[str, float]:
    """Rounds of every number of clients, of this version and, if asked, of an older one in turn."""
    from slackwater.zoo.tiny import make_model

    rounds = 1 if options.quick else 5
    with tempfile.TemporaryDirectory(prefix="slackwater-streaming-") as folder:
        model = Path(folder) / "tiny"
        make_model("tiny", model, seed=options.seed)
        services = {"": StreamedService(Path(folder) / "now", model, None)}
        try:
            if options.before is not None:
                old = StreamedService(Path(folder) / "before", model, options.before.resolve())
                services["before."] = old
            for service in services.values():
                service.wait()
            return _measure(services, rounds, options)
        finally:
            for service in services.values():
                service.stop()


def _measure(
    services: dict[str, StreamedService], rounds: int, options: BenchOptions
) -> dict[str, float]:
    seen = {(prefix, clients): _Seen() for clients in CLIENTS for prefix in services}
    for number in range(rounds):
        for place, ((prefix, clients), one) in enumerate(seen.items()):
            options.progress(f"{prefix}{clients} clients", (number + place / len(seen)) / rounds)
            one.measure(services[prefix], clients, max((4 if options.quick else 64) // clients, 4))
    figures: dict[str, float] = {"rounds": rounds, "tokens_each": _TOKENS}
    for (prefix, clients), one in seen.items():
        figures.update(one.figures(f"{prefix}{clients}"))
    for clients in CLIENTS if "before." in services else ():
        for what in ("tokens_per_s", "first_p50_ms", "first_p99_ms"):
            now, before = figures[f"{clients}.{what}"], figures[f"before.{clients}.{what}"]
            figures[f"{clients}.{what}_over_before"] = now / before
    return figures
