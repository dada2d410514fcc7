"""The demo of five kinds of slack in virtual time, from what its jobs took alone."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

from benchmarks.slacks.demo_record import AloneMeasures
from slackwater.control.fleet.messages import FleetEvent
from slackwater.control.rollout import commands as do
from slackwater.model.ids import InstanceId, JobId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.model.node import NodeType, Role
from slackwater.sim.fleet.costs import FleetCosts
from slackwater.sim.fleet.job import SimulatedJob
from slackwater.sim.inputs.scenario_file import PoolEntry
from slackwater.sim.rollout.agent_trace import AgentTurn, Session
from slackwater.sim.rollout.engine_cost import Accelerator, EngineCost, ModelShape, SharedDevice
from slackwater.sim.serving.cluster import ServingCluster
from slackwater.sim.serving.serving_trace import Arrival
from slackwater.sim.slacks.agents import SimulatedAgents
from slackwater.sim.slacks.fleet import FiveSlackFleet, LinkedEngines, Slack
from slackwater.sim.slacks.scenario import (
    PERIOD_S,
    AgentJob,
    ExternalPool,
    LinkEntry,
    ServingPool,
    SlackScenario,
)

_LOOK_S = 0.2  # how often the demo looks at its jobs
_BEFORE_S = 120.0  # the service is up so long before them, at least: a lender's window is over
_SPOT = InstanceId("spot")
_CORE = NodeType("core", 1, 2.0, 4096.0, 1000.0, 16.0, 1.0)
_MODEL = ModelShape("small", 0.0016, 4, 128, 2, 32)
_ASKED_S = 0.5  # between two requests of the demo's users
_SLICES = 4  # how often a save adapts to the current pace
_TRAJECTORIES, _GROUP, _TURNS = 32, 8, 2
_ON = frozenset(Slack) - {Slack.SPOT}  # the spot engine comes when the demo says


@dataclass(frozen=True, slots=True)
class DemoRunReport:
    """From when all jobs had made an iteration, as the demo counts; the spot engine's life."""

    completed_s: float
    spot_s: float
    attainment: float
    tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoScenario(SlackScenario):
    """The demo's fleet, with engines as fast as they were alone."""

    measures: AloneMeasures
    answer_s: float

    def engine(self, role: Role = Role.ROLLOUT) -> EngineCost:
        """A step reads the weights for seven eighths of its time: prefills share a step."""
        del role
        step_s = self.measures.step_s
        read_tb_per_s = _MODEL.weight_bytes / (7 / 8 * step_s) / 1e12
        core = Accelerator("core", 1000.0, 16.0, read_tb_per_s, bandwidth_share=1.0)
        return EngineCost(_MODEL, core, 1, step_overhead_s=step_s / 8)

    def serving_device(self) -> SharedDevice:
        engine = self.engine()
        return SharedDevice(engine, engine, 1e9, start_s=self.measures.loan_s)

    def arrivals(self, seed: int) -> list[Arrival]:
        del seed
        every_s = _ASKED_S + self.answer_s
        return [Arrival(n * every_s, 4, 24) for n in range(1, int(PERIOD_S / every_s))]


class _Engines(LinkedEngines):
    """A pull takes what it took alone, beside the others that there were then."""

    def pull_gb(self, spec: InstanceSpec, version: str) -> float:
        super().pull_gb(spec, version)
        pull_s = self._fleet.measures.pull_s  # type: ignore[attr-defined]
        return float(pull_s.get(spec.kind, pull_s["dedicated"])) / self._pulls


class _Agents(SimulatedAgents):
    """The demo's recipe samples each turn by itself, the first ones of a group in one request. It
    opens environments when the whole group is sampled.
    """

    named = False

    def __init__(self, fleet: "DemoFleet") -> None:
        super().__init__(fleet)
        self._demo, self._reply_s = fleet, fleet.measures.reply_s
        self._sampled: dict[tuple[JobId, int], list[do.CompleteTurn]] = defaultdict(list)

    def _roll_out(self, job: SimulatedJob) -> None:
        if job.iteration:
            self._demo.save()
        super()._roll_out(job)

    def _turn_completed(self, command: do.CompleteTurn) -> None:
        name, _, _, index = self._of[command.turn]
        if index:
            super()._turn_completed(command)
            return
        job = self.turns[command.turn].job
        group = self._sampled[job.job, int(name.rpartition(".")[2]) // _GROUP]
        group.append(command)
        if len(group) == _GROUP:
            reply_s = self._reply_s / self._fleet.pace()
            for one in group:
                self._fleet.after(reply_s, partial(super()._turn_completed, one))
            group.clear()


class DemoFleet(FiveSlackFleet):
    """Of the JSON that `slackwater demo --slacks` prints, and of what was measured alone."""

    serving: ServingCluster  # a demo always serves
    agents, linked_engines = _Agents, _Engines  # type: ignore[assignment]  # of this fleet

    def __init__(self, result: Mapping[str, Any], measures: AloneMeasures) -> None:
        rows, visit = result["jobs"], result["instance"]
        jobs = tuple(self._job(row, measures) for row in rows)
        pool = PoolEntry(_CORE, max_nodes=1)
        scenario = DemoScenario(
            *(pool, pool, jobs),
            policy="group",
            turns_per_device=measures.turns,
            serving=ServingPool(nodes=measures.serving_nodes, ttft_s=5.0, tpot_s=1.0),
            external=ExternalPool(cores=measures.cores),
            links=LinkEntry(gb_per_s=1.0),
            measures=measures,
            answer_s=result["served"]["median_s"],
        )
        self.costs = FleetCosts(
            load_s=0.1, switch_s=0.0, start_s=0.0, handover_s=measures.handover_s
        )
        self.measures = measures
        self._tokens = cycle(measures.tokens)
        self._iterations = sum(job.iterations for job in jobs)
        self._visit_start_s = float(visit.get("started_s", 0.0))
        self._began_s: float | None = None
        self._up_s: float | None = None
        self._spot_s = 0.0
        self._share, self._saves = 1.0, 0
        super().__init__(scenario, _ON)
        for row in rows:
            job = self.jobs[row["job"]]
            updated = row["trained"] / row["iterations"]
            # the trainer saves what it has trained before it goes on
            train_s = updated * measures.train_s + measures.sync_s
            job.lengths = replace(job.lengths, train_s=train_s)
        self._watch_iterations(asked=False)

    @staticmethod
    def _job(row: Mapping[str, Any], measures: AloneMeasures) -> AgentJob:
        profile = row["profile"]
        return AgentJob(
            *(row["job"], profile["rollout_s"], profile["train_s"]),
            iterations=row["iterations"],
            slo=row["bound"],
            trajectories=_TRAJECTORIES,
            reward_s=measures.action_s,
            arrival_s=_BEFORE_S,
        )

    def tell(self, *events: FleetEvent) -> None:
        """Whoever runs is as fast as its share of the cores is now."""
        super().tell(*events)
        share = self.pace()
        if share != self._share:
            self._share = share
            for node in self.serving.nodes.values():
                node.slowdown = 1.0 / share
            for name in list(self.engines.places):
                self.engines.slow_down(name, 1.0 / share)

    def pace(self) -> float:
        """What runs shares the machine's cores by what it needs."""
        nodes = self.serving.nodes.values()
        serving = (n.service.busy or (n.rollout and n.rollout.requests) for n in nodes)
        places = self.engines.places.values()
        own = (one.engine for one in places if one.spec.kind is not InstanceKind.BORROWED)
        trainers = self.trainers.living.values()
        running = {
            "serving": sum(map(bool, serving)),
            "engine": sum(bool(engine.requests) for engine in own),
            "action": self.cores.used,
            "trainer": sum(one.ticket is not None for one in trainers) + self._saves,
        }
        needed = sum(self.measures.processors[kind] * count for kind, count in running.items())
        return min(1.0, self.scenario.external.cores / max(needed, 1.0))

    def save(self) -> None:
        """A checkpoint of what was trained is written."""
        self._saves += 1
        self._go_on_saving(_SLICES)

    def _go_on_saving(self, slices: int) -> None:
        if slices:
            slice_s = self.measures.save_s / _SLICES / self.pace()
            self.after(slice_s, partial(self._go_on_saving, slices - 1))
        else:
            self._saves -= 1

    def sessions(self, job: SimulatedJob) -> list[Session]:
        """Every turn but the last is followed by a tool call as long as those alone."""
        del job
        action_s = self.measures.action_s
        return [
            tuple(AgentTurn(8, tokens, action_s) for tokens in islice(self._tokens, _TURNS))
            for _ in range(_TRAJECTORIES)
        ]

    def _watch_iterations(self, *, asked: bool) -> None:
        """The spot engine comes at a quarter of the iterations, and is killed at two thirds or
        when it is up.
        """
        done = self.clients.iterations
        if self._began_s is None and min(job.iteration for job in self.jobs.values()) >= 1:
            self._began_s = self.now_s
        if not asked and done >= 0.25 * self._iterations:
            asked = True
            self.after(self._visit_start_s, self._schedule_arrival)
        if self._up_s is not None and done >= 0.66 * self._iterations:
            self._spot_s = self.now_s - self._up_s
            self.engines.lose(_SPOT, "killed")
            return
        self.after(_LOOK_S, partial(self._watch_iterations, asked=asked))

    def _schedule_arrival(self) -> None:
        self._up_s = self.now_s
        turns = self.scenario.turns_per_device
        cost = self.scenario.engine()
        spec = self.engines.spec(_SPOT, InstanceKind.SPOT, cost, max_running=turns)
        self.engines.join(spec, cost)

    def report(self) -> DemoRunReport:
        """Run to the end of both jobs."""
        found = self.finish()
        assert self._began_s is not None
        assert found.attainment is not None
        took_s = found.completed_s - self._began_s
        return DemoRunReport(took_s, self._spot_s, found.attainment, found.tokens)
