"""A large fleet under one service: 200 engines with 64 turns each at 12 steps a second.

The service is `slackwater up` with one front end; the engines compute nothing, but speak the wire
protocol over sockets of their own, one frame a step. Clients keep every place taken through HTTP,
a completion each, for `--duration` seconds (600), and check every token of every answer.

`crowd_lost_turns`: answers that did not come, or were not whole. `crowd_decision_*`: the time of
the fleet controller's decisions (a turn submitted, ended, or moved), by the clock and in processor
time. `crowd_lag_*`: how late the control plane's event loop is. `crowd_memory_growth`: the largest
of control plane and front end, at the end over a sixth of the duration in.
"""

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import aiohttp
import httpx
import uvloop

from benchmarks.options import BenchOptions
from benchmarks.processor_use import FRONT, PLANE, ProcessorUse
from benchmarks.rollout.paced_engines import SECRET_VARIABLE, length_of, token_at
from benchmarks.service.crowd_node import MODEL
from benchmarks.service.times import read_times
from benchmarks.soak.memory_curves import MemoryCurves
from slackwater.model.errors import UnavailableError
from slackwater.runtime.launch.node_keys import NodeKeys
from slackwater.runtime.store.state_directory import StateDirectory

STEPS_PER_S = 12.0
_NODE = "crowd"
_FLEET = f"""launcher = "join"
[[pools]]
name = "crowd"
engines = {{engines}}
[[nodes]]
name = "{_NODE}"
pool = "crowd"
"""
_READY_S = 180.0
_BETWEEN_CLIENTS_S = 0.001  # a full backlog would delay connections by seconds
_FULL = 0.95
_LOOK_S = 5.0
_PARTIAL_S = 60.0
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class CrowdSize:
    """How large the fleet is; as many turns as there are places, each of up to `longest` tokens."""

    engines: int
    slots: int
    longest: int
    duration_s: float

    @property
    def turns(self) -> int:
        return self.engines * self.slots


_WHOLE = CrowdSize(200, 64, 1_400, 600.0)
_QUICK = CrowdSize(20, 16, 140, 15.0)


def crowd_figures(options: BenchOptions) -> dict[str, float]:
    """The whole run; what a cut one has is in its partial results."""
    size = _QUICK if options.quick else _WHOLE
    with (
        tempfile.TemporaryDirectory(prefix="slackwater-crowd-") as folder,
        CrowdService(Path(folder), size) as service,
    ):
        crowd = Crowd(service, size)
        found = uvloop.run(crowd.run(options, options.duration_s or size.duration_s))
        return {f"crowd_{name}": value for name, value in found.items()}


class CrowdService:
    """A watched service, and the process with its node's engines."""

    def __init__(self, folder: Path, size: CrowdSize) -> None:
        self._folder, self._size = folder, size
        self._state = StateDirectory(folder / "state")
        self.watched = folder / "times.json"
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "CrowdService":
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.terminate()
            process.wait(60)

    @property
    def pid(self) -> int:
        return self._processes[0].pid

    def _start(self) -> None:
        fleet = self._folder / "fleet.toml"
        fleet.write_text(_FLEET.format(engines=self._size.engines))
        up = ["up", "--state", str(self._state.root), "--port", "0", "--fleet", str(fleet)]
        up += ["--model", f"{MODEL}={self._make_model()}"]
        up += ["--max-running", str(self._size.slots)]
        up += ["--set", f"max_live_turns={2 * self._size.turns}"]
        self._spawn("benchmarks.service.watched_service", self.watched, *up)
        while (told := self._state.read_server()) is None:
            self._check()
        self.url, self.headers = told["url"], {"authorization": f"Bearer {told['key']}"}
        key = NodeKeys(self._state).key(_NODE, None)
        node = (told["join"]["hub"], _NODE, self._size.engines, self._size.slots)
        paced = (*node, STEPS_PER_S, self._size.longest)
        self._spawn("benchmarks.service.crowd_node", *paced, variables={SECRET_VARIABLE: key})
        while self.gauges()["rollout_instances"] < self._size.engines:
            self._check()

    def gauges(self) -> dict[str, float]:
        answer = httpx.get(f"{self.url}/slackwater/status", headers=self.headers, timeout=30.0)
        found: dict[str, float] = answer.raise_for_status().json()["gauges"]
        return found

    def _make_model(self) -> Path:
        """A tiny model that nobody loads, with room for the longest turn."""
        from slackwater.zoo.tiny import make_model

        model = self._folder / MODEL
        make_model("tiny", model)
        config = json.loads((model / "config.json").read_text())
        config["max_position_embeddings"] = 2 * self._size.longest + 256
        (model / "config.json").write_text(json.dumps(config))
        return model

    def _spawn(
        self, module: str, *arguments: object, variables: dict[str, str] | None = None
    ) -> None:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        with (self._folder / f"{module}.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | (variables or {})
            )
        self._processes.append(process)
        self._deadline_s = time.monotonic() + _READY_S

    def _check(self) -> None:
        """Wait a moment; UnavailableError if a process has ended or takes too long."""
        time.sleep(0.1)
        late = time.monotonic() > self._deadline_s
        if late or any(process.poll() is not None for process in self._processes):
            logs = [file.read_text()[-1000:] for file in sorted(self._folder.glob("*.log"))]
            raise UnavailableError(f"the service did not come up: {logs}")


class Crowd:
    """The clients, each with one completion under way after the other."""

    def __init__(self, service: CrowdService, size: CrowdSize) -> None:
        self._service, self._size = service, size
        self._text = bytes(token_at(place) for place in range(size.longest)).decode()
        self._seeds = itertools.count(1)
        self._is_over = False
        self.done = self.lost = 0
        self.last_error = ""

    async def run(self, options: BenchOptions, duration_s: float) -> dict[str, float]:
        """Measure from when the places are taken; then let every turn end."""
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            self._service.url, headers=self._service.headers, connector=connector, timeout=timeout
        ) as session:
            clients = [
                asyncio.create_task(self._client(session, number * _BETWEEN_CLIENTS_S))
                for number in range(self._size.turns)
            ]
            async with asyncio.timeout(_READY_S):
                while await self._live_turns() < _FULL * self._size.turns:
                    options.progress(f"{self.done} turns", 0.0)
                    await asyncio.sleep(1.0)
            window = CrowdWindow(self, self._service)
            while (at_s := window.look(await self._live_turns())) < duration_s:
                options.progress(f"{self.done} turns", at_s / duration_s)
                if at_s > _LOOK_S and at_s // _PARTIAL_S > (at_s - _LOOK_S) // _PARTIAL_S:
                    options.partial(f"crowd after {at_s:.0f} s", window.figures(duration_s))
                await asyncio.sleep(min(_LOOK_S, duration_s / 4))
            found = window.figures(duration_s)
            self._is_over = True
            longest_s = self._size.longest / STEPS_PER_S + _END_S
            _, unfinished = await asyncio.wait(clients, timeout=longest_s)
            for task in unfinished:
                task.cancel()
        if self.last_error:
            print(f"the last answer that was lost: {self.last_error}", file=sys.stderr)
        return {**found, "turns": self.done, "lost_turns": self.lost + len(unfinished)}

    async def _live_turns(self) -> float:
        gauges = await asyncio.to_thread(self._service.gauges)
        return gauges["rollout_live_turns"]

    async def _client(self, session: aiohttp.ClientSession, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        while not self._is_over:
            seed = next(self._seeds)
            try:
                error = await self._complete(session, seed)
            except (aiohttp.ClientError, ValueError, KeyError) as failure:
                error = repr(failure)
            if error:
                self.lost, self.last_error = self.lost + 1, error
                await asyncio.sleep(1.0)
            else:
                self.done += 1

    async def _complete(self, session: aiohttp.ClientSession, seed: int) -> str:
        """One completion; returns what is wrong with it."""
        body = {
            "model": MODEL,
            "prompt": f"Group {seed // 8}: what follows from this, in a few words?",
            "max_tokens": self._size.longest + 1,
            "seed": seed,
            "ignore_eos": True,
        }
        async with session.post("/v1/completions", json=body) as answer:
            said = await answer.read()
            if answer.status != 200:
                return f"{answer.status}: {said[:200]!r}"
        length = length_of(seed, self._size.longest)
        text = json.loads(said)["choices"][0]["text"]
        return "" if text == self._text[:length] else f"turn {seed}: {len(text)} of {length} tokens"


class CrowdWindow:
    """What happens from its construction on."""

    def __init__(self, crowd: Crowd, service: CrowdService) -> None:
        self._crowd, self._service = crowd, service
        self._used = ProcessorUse(service.pid)
        self._memory = MemoryCurves(service.pid)
        self._times, self._seconds = read_times(service.watched), self._used.seconds()
        self._done = crowd.done
        self._live: list[float] = []

    def look(self, live_turns: float) -> float:
        """Sample the memory; returns the seconds since the beginning."""
        self._memory.sample()
        self._live.append(live_turns)
        return time.monotonic() - self._memory.began_s

    def figures(self, duration_s: float) -> dict[str, float]:
        took_s = time.monotonic() - self._memory.began_s
        used, growth = self._used.seconds(), self._memory.growth(duration_s / 6)
        times = {
            name: now.since(self._times[name])
            for name, now in read_times(self._service.watched).items()
        }
        shares = {role: (used[role] - self._seconds[role]) / took_s for role in (PLANE, FRONT)}
        return {
            "seconds": took_s,
            "live_turns": sum(self._live) / len(self._live),
            "least_live_turns": min(self._live),
            "turns_per_s": (self._crowd.done - self._done) / took_s,
            **{
                f"{name}_p{share}_ms": 1e3 * times[name].percentile_s(share / 100)
                for name in ("lag", "decision", "decision_cpu")
                for share in (50, 99)
            },
            "memory_growth": max(growth.values(), default=0.0),
            **{f"{role}_cpu_share": share for role, share in shares.items()},
        }
