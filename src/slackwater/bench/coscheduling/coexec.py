"""bench coexec: real GRPO jobs that share one training core and one rollout core, against each alone in turn on the same cores.

One service, two nodes: an engine on one core, a trainer on the other. Jobs are submitted without a profile, so each is profiled
live, placed, and given permits phase by phase; their drivers are plain clients of the SDK. Rates are taken over the time in
which all jobs of a run made steps, after their first few. The joint simulator is given the profiles that were measured alone.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from slackwater.bench.options import BenchOptions
from slackwater.cli.own_service import own_service
from slackwater.model.errors import UnavailableError
from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.node import NodeType, Pool, Role
from slackwater.sim.cluster.scenario import ClusterScenario, PolicyConfig, TailConfig
from slackwater.sim.joint.job_run import TurnPlan
from slackwater.sim.joint.simulate import simulate_jointly
from slackwater.zoo.tiny import make_model

_SLO = 2.5
# Groups, answers each, tokens at most: rollout and training take about as long.
_SHAPE = (2, 4, 192)
_FIRST_STEPS = 4  # profiled, placed, and in step with the others by then
_STRETCH = (
    1000.0  # the simulator's loads and pulls are of large models: seconds become long beside them
)
_RUN_LIMIT_S = 1800.0

_FLEET = """
[[pools]]
name = "rollout"
engines = 1
[[pools]]
name = "train"
engines = 0
trainers = 1
[[nodes]]
name = "r0"
pool = "rollout"
cores = [{rollout}]
[[nodes]]
name = "t0"
pool = "train"
cores = [{train}]
"""


@dataclass(slots=True)
class JobResult:
    """What one driver wrote, and how the co-scheduler saw its job at the end."""

    name: str
    wrote: dict[str, Any]
    row: dict[str, Any]

    @property
    def ended_s(self) -> list[float]:
        found: list[float] = self.wrote["ended_s"]
        return found

    def rate(self, from_s: float, to_s: float) -> float:
        """Steps a second between two of the run's moments; over the whole run where the jobs never ran together."""
        inside = [at_s for at_s in self.ended_s if from_s <= at_s <= to_s]
        if len(inside) > 1:
            return (len(inside) - 1) / (inside[-1] - inside[0])
        return len(self.ended_s) / (self.ended_s[-1] - float(self.wrote["began_s"]))

    def differs(self, other: "JobResult") -> int:
        """How many answers and losses are not the same to the bit."""
        found = 0
        for field in ("tokens", "losses"):
            mine, others = self.wrote[field], other.wrote[field]
            found += abs(len(mine) - len(others))
            found += sum(int(a != b) for a, b in zip(mine, others, strict=False))
        return found


class Shop:
    """One service that jobs are run on, alone or together."""

    def __init__(self, url: str, key: str, folder: Path, steps: int) -> None:
        self._url, self._key, self._folder = url, key, folder
        self._steps = steps

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self._url, headers={"x-api-key": self._key}, timeout=60.0)

    def state(self) -> dict[str, Any]:
        """How the shared fleet stands."""
        with self._client() as client:
            found: dict[str, Any] = client.get("/slackwater/coschedule").raise_for_status().json()
        return found

    def run(self, run: str, seeds: list[int]) -> tuple[list[JobResult], dict[str, Any]]:
        """Jobs with these seeds together; their results, and the state while they ran and when they had ended."""
        drivers = [self._start(f"{run}-{seed}", seed) for seed in seeds]
        rows: dict[str, dict[str, Any]] = {}
        pools: list[dict[str, Any]] = []
        deadline_s = time.monotonic() + _RUN_LIMIT_S
        while any(process.poll() is None for _, process, _ in drivers):
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"run {run} took over {_RUN_LIMIT_S:.0f} s")
            state = self.state()
            rows |= {row["job"]: row for row in state["jobs"] if row["profile"] is not None}
            if all(process.poll() is None for _, process, _ in drivers):
                pools.append(state["nodes"])
            time.sleep(0.25)
        results = []
        for name, process, folder in drivers:
            if process.returncode != 0:
                said = (folder / "driver.log").read_text()[-2000:]
                raise UnavailableError(f"job {name} ended with {process.returncode}: {said}")
            wrote = _read(folder / "result.json")
            results.append(JobResult(name, wrote, rows.get(f"default/{name}", {})))
        return results, {"nodes": pools, "permits": self.state()["permits"]}

    def _start(self, name: str, seed: int) -> tuple[str, "subprocess.Popen[bytes]", Path]:
        terms = {"name": name, "iterations": self._steps + 40, "slo": _SLO}
        with self._client() as client:
            client.post("/slackwater/jobs", json=terms).raise_for_status()
        folder = self._folder / name
        folder.mkdir(parents=True)
        module = "slackwater.bench.coscheduling.grpo_driver"
        command = [sys.executable, "-m", module, self._url, name, str(folder / "result.json")]
        command += [str(number) for number in (seed, self._steps, *_SHAPE)]
        with (folder / "driver.log").open("wb") as log:
            environment = os.environ | {"SLACKWATER_KEY": self._key, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        return name, process, folder


def _read(file: Path) -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads(file.read_text())
    return found


def _window(results: list[JobResult]) -> tuple[float, float]:
    """While all of them made steps."""
    from_s = max(result.ended_s[_FIRST_STEPS - 1] for result in results)
    return from_s, min(result.ended_s[-1] for result in results)


def _utilisation(nodes: list[list[dict[str, Any]]]) -> dict[str, float]:
    """The share of looks at a node in which a phase held it."""
    held: dict[str, list[bool]] = {"rollout": [], "train": []}
    for look in nodes:
        for row in look:
            held[row["pool"]].append(row["job"] is not None)
    return {pool: sum(looks) / max(len(looks), 1) for pool, looks in held.items()}


def _predicted(profiles: list[JobProfile], steps: int) -> float:
    """The throughput of jobs with these profiles together, over one after the other, by the joint simulator."""
    kind = NodeType("node", 8, 1.0, 64.0, 1.0, 1.0, 1.0)
    specs = tuple(
        JobSpec(JobId(f"j{number}"), 0.0, steps, _SLO, profile)
        for number, profile in enumerate(profiles)
    )
    pools = (Pool(Role.ROLLOUT, kind, 1), Pool(Role.TRAIN, kind, 1))
    scenario = ClusterScenario(
        fleet=pools, jobs=specs, policy=PolicyConfig(name="group"), tail=TailConfig(enabled=False)
    )
    same = TurnPlan(turns=4, max_tokens=24, median_share=1.0, sigma=0.0)
    report = simulate_jointly(scenario, plan=same)
    return sum(steps * spec.profile.solo_s for spec in specs) / report.end_s


def _stretched(row: dict[str, Any]) -> JobProfile:
    profile = row["profile"]
    lengths = (profile["rollout_s"], profile["train_s"], profile["sync_s"])
    rollout_s, train_s, sync_s = (_STRETCH * value for value in lengths)
    return JobProfile(rollout_s, train_s, sync_s, 1, 1, 0.0, 0.0, 0.001)


def run(options: BenchOptions) -> dict[str, object]:
    """Three jobs alone, two together, three together."""
    steps = 7 if options.quick else 12
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="slackwater-coexec-") as made:
        folder = Path(made)
        make_model("medium", folder / "model", options.seed)
        fleet = folder / "fleet.toml"
        fleet.write_text(_FLEET.format(rollout=cores[0], train=cores[-1]))
        with own_service(
            *(folder / "state", "job", folder / "model", "--fleet", str(fleet)),
            *("--set", "coschedule.placement=group", "--set", "coschedule.tails=false"),
        ) as (url, key):
            shop = Shop(url, key, folder / "runs", steps)
            alone: list[JobResult] = []
            for number, seed in enumerate((0, 1, 2)):
                options.progress(f"job {number} alone", 0.1 + 0.15 * number)
                alone += shop.run("alone", [seed])[0]
            options.progress("two together", 0.55)
            two, two_state = shop.run("two", [0, 1])
            options.progress("three together", 0.75)
            three, three_state = shop.run("three", [0, 1, 2])
    profiles = [_stretched(result.row) for result in alone]
    figures: dict[str, object] = {"steps": steps, "slo": _SLO}
    figures["profiles"] = [
        {name: round(result.row["profile"][name], 4) for name in ("rollout_s", "train_s", "sync_s")}
        for result in alone
    ]
    different = 0
    for word, results, state in (("two", two, two_state), ("three", three, three_state)):
        window = _window(results)
        slowdowns = []
        for result in results:
            twin = next(a for a in alone if a.name.split("-")[1] == result.name.split("-")[1])
            rate_alone = twin.rate(*_window([twin]))
            slowdowns.append(rate_alone / max(result.rate(*window), 1e-9))
            different += result.differs(twin)
        live = sum(1 / slowdown for slowdown in slowdowns)
        predicted = _predicted(profiles[: len(results)], 60)
        figures[f"{word}_jobs_throughput"] = round(live, 3)
        figures[f"{word}_jobs_slowdowns"] = [round(slowdown, 3) for slowdown in slowdowns]
        figures[f"{word}_jobs_past_slo"] = sum(slowdown > _SLO for slowdown in slowdowns)
        figures[f"{word}_jobs_predicted"] = round(predicted, 3)
        figures[f"{word}_jobs_predicted_over_live"] = round(predicted / max(live, 1e-9), 3)
        use = _utilisation(state["nodes"])
        figures[f"{word}_jobs_rollout_utilisation"] = round(use["rollout"], 3)
        figures[f"{word}_jobs_train_utilisation"] = round(use["train"], 3)
    figures["permit_p99_ms"] = three_state["permits"]["p99_ms"]
    figures["permit_p50_ms"] = three_state["permits"]["p50_ms"]
    figures["permits"] = three_state["permits"]["given"]
    figures["switches"] = three_state["permits"]["switches"]
    figures["predicted_over_live"] = figures["two_jobs_predicted_over_live"]
    figures["different"] = different
    return figures
