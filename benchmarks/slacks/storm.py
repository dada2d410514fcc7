"""A storm over a fleet with all five kinds of slack, from a seed, and faults in each kind.

Nodes, trainers and drivers are lost; serving devices slow down under bursts; spot nodes vanish,
most of them without notice; the worker of the cores dies; pulls break off. Every invariant is
checked after every event, and every job must finish with all its iterations.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from harness.checked_fleet import CheckedSlackFleet
from slackwater.model.ids import NodeId
from slackwater.sim.slacks.fleet import Slack
from slackwater.sim.slacks.scenario import AgentJob, SlackScenario, SpotPool

_EVERY_S = {  # mean time between faults of a kind
    "nodes_lost": 1500.0,
    "trainers_lost": 1200.0,
    "crashes": 1500.0,
    "slow_services": 300.0,
    "cores_lost": 300.0,
}
_BROKEN_PULLS = 0.1


@dataclass(frozen=True, slots=True)
class SlackStormReport:
    """What a storm came to."""

    seed: int
    hours: float
    events: int
    jobs: int
    kinds: int
    moved_turns: int
    loans: int
    faults: dict[str, int]


class SlackStorm:
    """Jobs come for so many hours; when the last has ended, the storm is over."""

    def __init__(self, scenario: SlackScenario, seed: int, hours: float) -> None:
        self._end_s = hours * 3600
        rng = np.random.default_rng((seed, 28))
        arrivals = np.cumsum(rng.exponential(500.0, int(hours * 7.2) + 2))
        first = scenario.jobs[0]
        jobs = [
            self._job(first, number, float(at_s), rng)
            for number, at_s in enumerate(arrivals)
            if at_s < self._end_s or number < 2
        ]
        stormy = replace(
            scenario,
            jobs=tuple(jobs),
            spot=SpotPool(2.0, 12.0, notice_s=5.0 * (seed % 2)),
            serving=replace(scenario.serving, requests_per_s=0.05),
        )
        self.fleet = CheckedSlackFleet(stormy, frozenset(Slack), seed)
        self.fleet.engines.breaks = lambda: self.fleet.chance(_BROKEN_PULLS)
        self.faults = dict.fromkeys(_EVERY_S, 0)

    @staticmethod
    def _job(first: AgentJob, number: int, at_s: float, rng: np.random.Generator) -> AgentJob:
        return replace(
            first,
            name=f"j{number}",
            arrival_s=at_s,
            slo=float(rng.uniform(1.5, 4.0)),
            iterations=int(rng.integers(1, 4)),
            trajectories=int(rng.integers(4, 20)),
            rollout_nodes=int(rng.integers(1, 3)),
            train_s=float(rng.uniform(10, 60)),
        )

    def run(self) -> SlackStormReport:
        """Rage, then see that everything ends."""
        fleet = self.fleet
        for name in _EVERY_S:
            self._again(name)
        result = fleet.finish()
        wanted = {job.job: job.spec.iterations for job in fleet.jobs.values()}
        made = {job.job: job.iteration for job in fleet.jobs.values()}
        assert made == wanted, f"iterations were lost: {made}, not {wanted}"
        fleet.check_integrity()
        serving = fleet.serving
        assert serving is not None
        return SlackStormReport(
            *(fleet.seed, fleet.now_s / 3600, fleet.events, len(made), len(result.kinds)),
            *(result.moved_turns, serving.loans, self.faults),
        )

    # ---- trouble ----
    def _again(self, name: str) -> None:
        self.fleet.after(self.fleet.wait_s(_EVERY_S[name]), partial(self._strike, name))

    def _strike(self, name: str) -> None:
        fleet = self.fleet
        if fleet.now_s >= self._end_s:
            return
        strikes: dict[str, Callable[[], None]] = {
            "nodes_lost": lambda: fleet.lose_node(self._a_node("")),
            "trainers_lost": lambda: fleet.trainers.lose_node(self._a_node("train"), "killed"),
            "crashes": self._crash,
            "slow_services": self._slow_down,
            "cores_lost": fleet.cores.lose_worker,
        }
        self.faults[name] += 1
        strikes[name]()
        self._again(name)

    def _a_node(self, pool: str) -> NodeId:
        nodes = [node for node in self.fleet.scheduler.nodes if node.startswith(pool)]
        return nodes[int(self.fleet.rng.integers(len(nodes)))]

    def _crash(self) -> None:
        alive = [job for job in self.fleet.jobs.values() if job.alive]
        if alive:
            job = alive[int(self.fleet.rng.integers(len(alive)))]
            self.fleet.clients.crash(job, "it crashed")

    def _slow_down(self) -> None:
        """A serving device is much slower for a while, as under somebody else's load."""
        serving = self.fleet.serving
        assert serving is not None
        nodes = list(serving.nodes.values())
        node = nodes[int(self.fleet.rng.integers(len(nodes)))]
        node.slowdown = float(self.fleet.rng.uniform(2, 8))
        self.fleet.after(20.0, partial(setattr, node, "slowdown", 1.0))
