"""The demo of five kinds of slack in virtual time: jobs, a service that lends, a spot engine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from slackwater.control.lending import events as on_lending
from slackwater.model.ids import InstanceId, JobId, NodeId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.node import H20, H800, Pool, Role
from slackwater.sim.cluster.scenario import ClusterScenario, PolicyConfig
from slackwater.sim.cluster.simulate import new_controller
from slackwater.sim.fleet.costs import FleetCosts
from slackwater.sim.fleet.engines import BASE_MODEL
from slackwater.sim.fleet.fleet import SimulatedFleet
from slackwater.sim.fleet.job import TurnPlan
from slackwater.sim.fleet.serving import SimulatedServing

_SWITCH_S = 0.05
_LOOK_S = 0.2  # how often the demo looks at its jobs
_BEFORE_S = 120.0  # the service is up so long before them, at least: a lender's window is over
_SPOT = InstanceSpec(
    *(InstanceId("spot"), InstanceKind.SPOT, 64, 4096, 1 << 20),
    max_versions=4,
    base_model=BASE_MODEL,
)


@dataclass(frozen=True, slots=True)
class DemoRunReport:
    """From when all jobs had made an iteration, as the demo counts; the spot engine's life."""

    completed_s: float
    spot_s: float
    tokens: Mapping[str, int]


class _IdleServing(SimulatedServing):
    """A served model with few requests: its devices may be lent all the time."""

    def _report(self, node: NodeId) -> None:
        fleet = self._fleet
        fleet.tell(on_lending.ServingNodeReported(fleet.now_s, node, 0.1, 0.1, True))
        fleet.after(_LOOK_S, partial(self._report, node))


class DemoFleet(SimulatedFleet):
    """Of the JSON that `slackwater demo --slacks` prints."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        rows, visit = result["jobs"], result["instance"]
        specs = [self._spec(row) for row in rows]
        lengths = {
            spec.job: replace(
                spec.profile,
                train_s=max(spec.profile.train_s * row["trained"] / row["iterations"], 1e-3),
            )
            for spec, row in zip(specs, rows, strict=True)
        }
        self._iterations = sum(spec.iterations for spec in specs)
        self._visit_start_s = float(visit.get("started_s", 0.0))
        self._began_s: float | None = None
        self._up_s: float | None = None
        self._spot_s = 0.0
        pools = (Pool(Role.ROLLOUT, H20, 1), Pool(Role.TRAIN, H800, 1))
        policy = PolicyConfig(name="group")
        scenario = ClusterScenario(fleet=pools, jobs=tuple(specs), policy=policy)
        super().__init__(
            new_controller(scenario),
            specs,
            # a rollout takes what it took alone, with all its trajectories to its end
            plan=TurnPlan(turns=32, median_share=1.0, sigma=0.0),
            costs=FleetCosts(_SWITCH_S, _SWITCH_S, _SWITCH_S, _SWITCH_S),
            lengths=lengths,
            serving_nodes=2,
        )
        self._watch_iterations(asked=False)

    @staticmethod
    def _spec(row: Mapping[str, Any]) -> JobSpec:
        profile = JobProfile(**row["profile"], rollout_state_gb=1.0, train_state_gb=1.0)
        return JobSpec(JobId(row["job"]), _BEFORE_S, row["iterations"], row["bound"], profile)

    def _open(self, serving_nodes: int) -> None:
        super()._open(serving_nodes)
        self.serving = _IdleServing(self, serving_nodes)

    def _watch_iterations(self, *, asked: bool) -> None:
        """The spot engine comes at a quarter of the iterations, and is killed at two thirds or
        when it is up.
        """
        done = self.clients.iterations
        if self._began_s is None and min(job.iteration for job in self.jobs.values()) >= 1:
            self._began_s = self.now_s
        if not asked and done >= 0.25 * self._iterations:
            asked = True
            self.after(self._visit_start_s, self._come)
        if self._up_s is not None and done >= 0.66 * self._iterations:
            self._spot_s = self.now_s - self._up_s
            self.engines.lose(_SPOT.instance, "killed")
            return
        self.after(_LOOK_S, partial(self._watch_iterations, asked=asked))

    def _come(self) -> None:
        self._up_s = self.now_s
        self.engines.join(_SPOT, NodeId("spot"))

    def finish(self) -> DemoRunReport:
        """Run to the end of both jobs."""
        self.run()
        assert self._began_s is not None
        tokens = self.controller.rollout.tokens_by_source().get(BASE_MODEL, {})
        return DemoRunReport(self.now_s - self._began_s, self._spot_s, tokens)
