"""What a quiet tenant's requests take while a loud one does its worst: alone, and beside each
attack.

One service in a process of its own, two tenants, a tiny model. The quiet one asks for one small
completion after the other: a sentence in, 32 tokens out, answered whole. "Alone" is that by the
client's clock (connection kept, HTTP, tokenising, queue, engine, text) while the loud tenant does
nothing, after the service and its workers have come to rest; beside an attack (`loud.py`) it is the
same. What is measured is the service's fairness, so the loud tenant's client, which would be on
another machine, has the least priority here. Rounds of all attacks follow each other, alone between
them.

`<attack>_p50_ms`, `_p99_ms` and the same of `alone`, over all rounds; `_p99_ratio` is one over the
other, `worst_p99_ratio` the largest. `alone_again_*` is a second measurement of alone, with as many
requests as beside an attack: its ratio is noise. What does not hang on the machine's load:
`_loop_longest_cpu_ms`, the longest time that the event loop was held, in processor time;
`_plane_cpu_ms`, `_front_cpu_ms` and `_engine_cpu_ms`, the processor time that these processes took
per quiet request; and `engine_*`, what an engine's shares do (`engine_shares.py`).
`quiet_requests_failed` must be 0. `action_*` are the same of actions in sandboxes
(`action_tenants.py`).

The name of an attack as the part measures that attack alone.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np

from benchmarks.options import BenchOptions
from benchmarks.processor_use import ENGINE, FRONT, HOST, PLANE, ProcessorUse
from benchmarks.service.action_tenants import action_figures
from benchmarks.service.engine_shares import engine_shares
from benchmarks.service.loud import ATTACKS, Attack
from slackwater.model.errors import UnavailableError

PARTS = ("actions", "engine", "requests", *ATTACKS)
_QUIET_BODY = {
    **{"model": "tiny", "prompt": "What follows from this, in a few words?"},
    **{"max_tokens": 32, "ignore_eos": True, "temperature": 0},
}
_ALONE_BEFORE_EVERY = 4  # attacks
_READY_S = 120.0
_ROLES = (PLANE, FRONT, ENGINE)


class TwoTenants:
    """A service with a `quiet` and a `loud` tenant."""

    def __init__(self, folder: Path, model: Path | None, *options: str) -> None:
        self._folder = folder
        command = [sys.executable, "-m", "slackwater", "up", "--state", str(folder), "--port", "0"]
        command += [] if model is None else ["--model", f"tiny={model}"]
        command += ["--tenant", "quiet", "--tenant", "loud", *options]
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

    def cpu_s(self) -> dict[str, float]:
        """Processor time of the service's processes so far, by role."""
        used = ProcessorUse(self._process.pid).seconds()
        del used[HOST]  # of the whole machine, and none of the service's
        return used

    def rest(self, limit_s: float = 60.0) -> None:
        """Until it and its workers do next to nothing: what a client that has left began may still
        be decoded.
        """
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            before_s = sum(self.cpu_s().values())
            time.sleep(0.25)
            if sum(self.cpu_s().values()) - before_s < 0.05:
                return
        raise UnavailableError(f"the service did not come to rest within {limit_s:g} s")

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


def attack(service: TwoTenants, name: str) -> Attack:
    """The loud tenant's attack of that name."""
    return Attack(service.url, service.key("loud"), name)


def run(options: BenchOptions) -> dict[str, float]:
    """p50 and p99 of the quiet tenant, alone and beside each attack."""
    from slackwater.zoo.tiny import make_model

    rounds, requests = (1, 40) if options.quick else (4, 60)
    figures: dict[str, float] = {"rounds": rounds, "requests_each": requests}
    with tempfile.TemporaryDirectory(prefix="slackwater-tenants-") as folder:
        model = Path(folder) / "tiny"
        make_model("tiny", model, seed=options.seed)
        if options.wants("actions"):
            figures.update(action_figures(options, rounds * requests))
        if options.wants("engine"):
            figures.update(engine_shares(model, rounds * requests))
        attacks = [name for name in ATTACKS if options.part in (None, "requests", name)]
        if attacks:
            figures.update(_request_figures(options, model, rounds, requests, attacks))
    return figures


def _request_figures(
    options: BenchOptions, model: Path, rounds: int, requests: int, attacks: list[str]
) -> dict[str, float]:
    alone, again, seen = _Seen(), _Seen(), {name: _Seen() for name in attacks}
    for number in range(rounds):
        # A service of its own for each round, since samples that were asked for by the Tinker API,
        # the last attack, go on for minutes.
        state = model.parent / f"state-{number}"
        state.mkdir()
        with TwoTenants(state, model) as service, service.client("quiet") as quiet:
            latencies(quiet, 10)
            for place, name in enumerate(attacks):
                done = (number + place / len(attacks)) / rounds
                options.progress(f"{name}, round {number + 1} of {rounds}", done)
                service.rest()
                if place % _ALONE_BEFORE_EVERY == 0:
                    alone.measure(service, quiet, requests)
                if place == (number + 1) * len(attacks) // (rounds + 1):
                    again.measure(service, quiet, requests)
                    service.rest()
                with attack(service, name):
                    seen[name].measure(service, quiet, requests)
    figures = alone.figures("alone")
    for name, one in {"alone_again": again, **seen}.items():
        figures.update(one.figures(name))
        for share in ("p50", "p99"):
            ratio = figures[f"{name}_{share}_ms"] / figures[f"alone_{share}_ms"]
            figures[f"{name}_{share}_ratio"] = ratio
    figures["worst_p99_ratio"] = max(figures[f"{name}_p99_ratio"] for name in attacks)
    figures["quiet_requests_failed"] = float(
        sum(one.failed for one in (alone, again, *seen.values()))
    )
    return figures


class _Seen:
    """The quiet tenant's requests of all rounds, alone or beside one attack."""

    def __init__(self) -> None:
        self.failed = 0
        self._taken_s: list[float] = []
        self._held_cpu_s = 0.0
        self._cpu_s = dict.fromkeys(_ROLES, 0.0)

    def measure(self, service: TwoTenants, quiet: httpx.Client, requests: int) -> None:
        before_s = service.cpu_s()
        taken_s, missed = latencies(quiet, requests)
        after_s = service.cpu_s()
        for role in _ROLES:
            self._cpu_s[role] += after_s[role] - before_s[role]
        self._held_cpu_s = max(self._held_cpu_s, service.gauge("slackwater_loop_longest_cpu_s"))
        self._taken_s += taken_s
        self.failed += missed

    def figures(self, name: str) -> dict[str, float]:
        ms = {
            "p50": float(np.percentile(self._taken_s, 50)),
            "p99": float(np.percentile(self._taken_s, 99)),
            "loop_longest_cpu": self._held_cpu_s,
            **{f"{role}_cpu": used_s / len(self._taken_s) for role, used_s in self._cpu_s.items()},
        }
        return {f"{name}_{figure}_ms": seconds * 1e3 for figure, seconds in ms.items()}
