"""A rollout job and a serving cluster together: how long rollouts take, and what the service's
users see.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.rollout.simulated.agent_run import ROLLOUT_JOB, AgentFleet, Trajectories
from benchmarks.rollout.simulated.driven_engines import DrivenEngines
from benchmarks.serving.simulated.lending_cluster import LendingCluster, LendingPlan
from slackwater.control.fleet.controller import FleetController
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.control.weights.events import WeightsPublished
from slackwater.model.ids import InstanceId, TurnId
from slackwater.model.instance import InstanceKind
from slackwater.model.serving import ServingSlo
from slackwater.sim.core.queue import EventQueue
from slackwater.sim.rollout.agent_trace import Session
from slackwater.sim.rollout.simulated_instances import InstanceSettings
from slackwater.sim.serving.serving_trace import Arrival

_END_S = 86_400.0


@dataclass(frozen=True, slots=True)
class RolloutStages:
    """RL steps: `count` stages with these trajectories each, and training in between."""

    sessions: Sequence[Session]
    count: int = 2
    train_s: float = 20.0


@dataclass(frozen=True, slots=True)
class CoservingResult:
    """`ttft_s` and `tpot_s` by request, in the order of arrival, each answered to its end: those of
    the trace, and those that came while the last stage was not over. `free_share` of the serving
    devices' time is left free by the promise (`Arbiter.needed_s`); `harvest` is the rollouts' time
    over that while a stage runs.
    """

    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]
    stages_s: tuple[float, ...]
    serving_share: float
    rollout_share: float
    cuts: int
    given_back: int
    moved_turns: int
    preempted: int
    free_share: float
    harvest: float

    @property
    def rollout_s(self) -> float:
        return float(np.mean(self.stages_s)) if self.stages_s else float("nan")

    def met(self, slo: ServingSlo) -> NDArray[np.bool_]:
        """Which requests got what was promised."""
        met: NDArray[np.bool_] = (self.ttft_s <= slo.ttft_s) & (self.tpot_s <= slo.tpot_s)
        return met

    def beside(self, alone: "CoservingResult", slo: ServingSlo) -> tuple[int, int]:
        """Misses that it added to those of the same requests without lending, and their
        difference; both runs must have answered a request for it to count.
        """
        both = min(len(self.ttft_s), len(alone.ttft_s))
        met, kept = self.met(slo)[:both], alone.met(slo)[:both]
        return int((kept & ~met).sum()), int(kept.sum() - met.sum())

    def percentile_ms(self, of: str, share: float) -> float:
        """`ttft` or `tpot`, in milliseconds."""
        values = self.ttft_s if of == "ttft" else self.tpot_s
        known = values[~np.isnan(values)]
        return 1e3 * float(np.quantile(known, share)) if len(known) else float("nan")


class CoservingRun:
    """Sets everything up on one event queue; `run` lets it happen. Tests look into its parts."""

    def __init__(
        self,
        plan: LendingPlan,
        fleet: AgentFleet,
        stages: RolloutStages,
        arrivals: Sequence[Arrival],
        settings: RolloutSettings | None = None,
        cluster: type[LendingCluster] = LendingCluster,
    ) -> None:
        queue: EventQueue[Callable[[], None]] = EventQueue()
        self.controller = FleetController(settings or RolloutSettings(turn_timeout_s=_END_S))
        self.manager = self.controller.rollout
        links = InstanceSettings(borrowed_heartbeat_s=0.5)
        self.body = DrivenEngines(self.controller, queue, lambda turn: self._tokens_of[turn], links)
        self.cluster = cluster(plan, self.body, arrivals)
        self.stages_s: list[float] = []
        self._plan, self._stages, self._fleet = plan, stages, fleet
        self._tokens_of: dict[TurnId, int] = {}
        self._trajectories: Trajectories | None = None
        self._began_s = 0.0

    def run(
        self,
        seconds: float,
        after_event: Callable[[], None] | None = None,
        *,
        begins_s: float = 1.0,
    ) -> CoservingResult:
        """The trace is `seconds` long, and comes again until all stages are over; the first begins
        at `begins_s`. Every request that came by then is answered.
        """
        body = self.body
        body.tell(WeightsPublished(0.0, None, "v0"))
        for number in range(self._fleet.engines):
            name, kind, engine = (
                InstanceId(f"e{number}"),
                InstanceKind.DEDICATED,
                self._fleet.engine,
            )
            spec = body.spec(name, kind, engine, max_running=self._fleet.max_running)
            body.join(spec, engine, holds="v0")
        body.schedule(0.0, lambda: self.cluster.start(seconds))
        if self._stages.count:
            body.schedule(begins_s, self._begin_stage)

        def end_step() -> bool:
            if after_event is not None:
                after_event()
            self._look()
            if len(self.stages_s) == self._stages.count and body.now_s >= seconds:
                self.cluster.closed = True
            return self.cluster.closed and not self.cluster.unanswered

        body.run_until(_END_S, end_step)
        assert len(self.stages_s) == self._stages.count, "rollouts never ended"
        return self._result()

    def _begin_stage(self) -> None:
        stage = len(self.stages_s)
        self._began_s = self.body.now_s
        trajectories = Trajectories(self.body, self._stages.sessions, f"{stage}-")
        self._trajectories = trajectories
        self._tokens_of = trajectories.tokens_of
        self.cluster.want(ROLLOUT_JOB, len(self.cluster.nodes))
        trajectories.start()

    def _look(self) -> None:
        """Has the stage ended?"""
        if self._trajectories is None or self._trajectories.left:
            return
        self._trajectories = None
        self.stages_s.append(self.body.now_s - self._began_s)
        self.cluster.release(ROLLOUT_JOB)
        if len(self.stages_s) < self._stages.count:
            self.body.schedule(self.body.now_s + self._stages.train_s, self._begin_stage)

    def _result(self) -> CoservingResult:
        counted = self.cluster.requests
        nodes = self.cluster.nodes.values()
        spent_s = self.body.now_s * len(nodes)
        free_share = 1.0 - sum(node.use.needed_s for node in nodes) / spent_s
        rolled_s = sum(node.use.rollout_s for node in nodes)
        free_s = free_share * sum(self.stages_s) * len(nodes)
        return CoservingResult(
            np.array([one.ttft_s for one in counted]),
            np.array([one.tpot_s if one.goal_tokens > 1 else 0.0 for one in counted]),
            tuple(self.stages_s),
            sum(node.use.serving_s for node in nodes) / spent_s,
            sum(node.use.rollout_s for node in nodes) / spent_s,
            sum(node.use.cuts for node in nodes),
            sum(node.use.given_back for node in nodes),
            self.manager.state.counters.moved,
            sum(node.service.preemptions for node in nodes),
            free_share,
            rolled_s / free_s if free_s > 0 else 0.0,
        )
