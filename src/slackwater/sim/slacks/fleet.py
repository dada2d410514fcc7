"""A simulated fleet with five kinds of slack on one clock, each of which can be switched off.

The complete fleet controller with its co-scheduler and lender, the arbiters of serving devices and
the action broker decide. Engines pull over one link, and batch turns as their costs say.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from slackwater.control.coschedule.commands import PermitGiven, RentNodes, ReturnNodes
from slackwater.control.fleet.messages import FleetCommand
from slackwater.control.lending.lender import Lender, LendingController
from slackwater.control.timer import TimerFired
from slackwater.control.weights.commands import DeleteVersion, DropVersion, PullVersion
from slackwater.model.ids import InstanceId, JobId, NodeId, TurnId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.model.node import Role
from slackwater.model.placement import Phase
from slackwater.model.spot_trace import SpotEvent
from slackwater.policy.serving.modes import find_mode
from slackwater.sim.cluster.scenario import ClusterScenario, PolicyConfig
from slackwater.sim.cluster.simulate import new_controller
from slackwater.sim.core.queue import EventQueue
from slackwater.sim.fleet.costs import FleetCosts
from slackwater.sim.fleet.fleet import SimulatedFleet
from slackwater.sim.fleet.job import BASE_MODEL, SimulatedJob
from slackwater.sim.fleet.trainers import SimulatedTrainers
from slackwater.sim.rollout.agent_trace import Session
from slackwater.sim.rollout.extra_capacity import SpotCapacity
from slackwater.sim.rollout.simulated_instances import InstanceSettings, SimulatedInstances
from slackwater.sim.serving.cluster import ClusterPlan, ServingCluster
from slackwater.sim.slacks.agents import AgentFleet, SimulatedAgents
from slackwater.sim.slacks.cores import SimulatedCores
from slackwater.sim.slacks.scenario import SlackScenario

MOST_S = 7 * 86_400.0


class Slack(StrEnum):
    """Where a fleet's resources lie idle."""

    PHASES = "phases"
    SERVING = "serving"
    SPOT = "spot"
    ACTIONS = "actions"
    WEIGHTS = "weights"


Kinds = frozenset[Slack]


@dataclass(frozen=True, slots=True)
class SlackRun:
    """The result of a run: the time of each job from its arrival, the fleet's cost, the share of
    requests within the SLO (None without loans), and rollout tokens by source.
    """

    job_s: dict[JobId, float]
    completed_s: float
    cost: float
    attainment: float | None
    tokens: dict[str, int]
    shared_nodes: int
    actions: int
    deltas: int
    moved_turns: int
    nodes: tuple[NodeId, ...]

    @property
    def kinds(self) -> Kinds:
        """Those that were used."""
        seen = {
            Slack.PHASES: self.shared_nodes,
            Slack.SERVING: self.tokens.get(InstanceKind.BORROWED, 0),
            Slack.SPOT: self.tokens.get(InstanceKind.SPOT, 0),
            Slack.ACTIONS: self.actions,
            Slack.WEIGHTS: self.deltas,
        }
        return frozenset(kind for kind, count in seen.items() if count)


class LinkedEngines(SimulatedInstances):
    """One engine on every node, and those that come and go; all pull over one link.

    An engine that has an earlier version of a job, or was lent with the base model, pulls what has
    changed, if deltas are shipped.
    """

    def __init__(self, fleet: "FiveSlackFleet", tokens_of: Callable[[TurnId], int]) -> None:
        speed = fleet.scenario.links.gb_per_s
        settings = InstanceSettings(
            borrowed_heartbeat_s=1.0, pull_gb_per_s=speed, sender_gb_per_s=speed, max_versions=4
        )
        super().__init__(fleet.queue, tokens_of, fleet.tell, settings)
        self._fleet = fleet
        self._costs = {role: fleet.scenario.engine(role) for role in (Role.ROLLOUT, Role.TRAIN)}
        self._starts = 0
        self._held: dict[InstanceId, set[str]] = {}
        self.pulls = self.deltas = 0

    def start(self, node: NodeId) -> None:
        """Start a node's engine, without weights."""
        self._fleet.record_start(node, "engine")
        self._starts += 1
        name = InstanceId(f"{node}/engine/{self._starts}")
        cost = self._costs[Role(node.partition("-")[0])]
        turns = self._fleet.scenario.turns_per_device * cost.devices
        spec = self.spec(name, InstanceKind.DEDICATED, cost, max_running=turns, place=node)
        self.join(spec, cost)

    def execute(self, command: FleetCommand) -> None:
        match command:
            case PullVersion(instance, version):
                deleted = version in self._fleet.deleted_versions
                assert not deleted, f"{instance} pulls {version}, which is deleted"
                super().execute(command)
            case DropVersion(instance, version):
                self._held.get(instance, set()).discard(version)
            case DeleteVersion(version):
                self._fleet.deleted_versions.add(version)
            case _:
                super().execute(command)

    def pull_gb(self, spec: InstanceSpec, version: str) -> float:
        held = self._held.setdefault(spec.instance, set())
        job = version.partition("@")[0]
        near = spec.kind is InstanceKind.BORROWED or any(
            one.partition("@")[0] in (job, "base") for one in held
        )
        held.add(version)
        self.pulls += 1
        if not near or Slack.WEIGHTS not in self._fleet.on:
            return self._weight_gb
        self.deltas += 1
        return self._weight_gb * self._fleet.scenario.links.changed_share

    def lose_node(self, node: NodeId) -> None:
        """Lose the node's engine; another starts."""
        for name in [name for name, one in self.places.items() if one.spec.place == node]:
            self.lose(name, "its node is gone")
            self._fleet.after(self._fleet.costs.start_s, partial(self.start, node))

    def lose(self, instance: InstanceId, why: str = "preempted") -> None:
        self._held.pop(instance, None)
        super().lose(instance, why)


class FiveSlackFleet(AgentFleet):
    """The fleet of a scenario with some kinds of slack `on`."""

    engines: LinkedEngines
    clients: SimulatedAgents
    serving: ServingCluster | None
    costs = FleetCosts(load_s=5.0, switch_s=1.0)
    agents, linked_engines = SimulatedAgents, LinkedEngines

    def __init__(self, scenario: SlackScenario, on: Collection[Slack], seed: int = 0) -> None:
        self.scenario, self.on = scenario, frozenset(on)
        self._jobs_by_name = {JobId(job.name): (n, job) for n, job in enumerate(scenario.jobs)}
        self._uses: dict[NodeId, set[tuple[JobId, Phase]]] = {}
        self._rented: set[NodeId] = set()
        self._rented_s: dict[NodeId, float] = {}
        self._node_s: dict[str, float] = defaultdict(float)
        self._spot = scenario.spot_events(seed)
        name = scenario.policy if Slack.PHASES in self.on else "solo"
        pools = (scenario.rollout.pool(Role.ROLLOUT), scenario.train.pool(Role.TRAIN))
        cluster = ClusterScenario(
            fleet=pools, jobs=scenario.specs(), policy=PolicyConfig(name=name), seed=seed
        )
        super().__init__(
            new_controller(cluster),
            scenario.specs(),
            seed=seed,
            costs=self.costs,
            lending=LendingController([BASE_MODEL]) if Slack.SERVING in self.on else None,
        )

    def _open(self) -> None:
        scenario = self.scenario
        self.cores = SimulatedCores(self, scenario.external.cores, pooled=Slack.ACTIONS in self.on)
        self.trainers = SimulatedTrainers(self)
        self.clients = self.agents(self)
        self.engines = self.linked_engines(self, self._tokens_of)
        if Slack.SERVING in self.on:
            self.serving = serving_cluster(scenario, self.engines, self.seed, self)
        if Slack.SPOT in self.on:
            notice_s = scenario.spot.notice_s
            cost, turns = scenario.engine(), scenario.turns_per_device
            capacity = SpotCapacity(self._spot, turns * cost.devices, notice_s=notice_s)
            capacity.attach(self.engines, cost)

    def _tokens_of(self, turn: TurnId) -> int:
        asked = self.clients.turns.get(turn)
        return 1 if asked is None else asked.tokens

    def _timer_due(self, event: TimerFired) -> None:
        self.engines.stream_all()
        self.driver.feed(event)

    # ---- workload ----
    def sessions(self, job: SimulatedJob) -> list[Session]:
        number, entry = self._jobs_by_name[job.job]
        return entry.sessions((self.seed, number, job.iteration))

    def reward_s(self, job: JobId) -> float:
        return self._jobs_by_name[job][1].reward_s

    # ---- costs ----
    def _note(self, command: FleetCommand) -> None:
        match command:
            case RentNodes(nodes):
                self._rented_s |= dict.fromkeys(nodes, self.now_s)
                self._rented.update(nodes)
            case ReturnNodes(nodes):
                for node in nodes:
                    self._charge(node)
            case _:
                if isinstance(command, PermitGiven):
                    for node in command.nodes:
                        self._uses.setdefault(node, set()).add((command.job, command.phase))
                super()._note(command)

    def _charge(self, node: NodeId) -> None:
        self._node_s[node.partition("-")[0]] += self.now_s - self._rented_s.pop(node)

    # ---- a whole run ----
    def finish(self) -> SlackRun:
        """Run until every job has ended, and every request that came is answered."""
        self.run(MOST_S)
        assert not self.unsettled, f"jobs never ended: {self.describe_unfinished()}"
        ended_s = self.clients.ended_s
        completed_s = max(ended_s.values())
        for node in list(self._rented_s):
            self._charge(node)
        serving, attainment = self.serving, None
        if serving is not None:
            serving.closed = True
            while serving.unanswered:
                self.queue.pop()()
            attainment = serving.attainment(completed_s)
        return SlackRun(
            {job: ended_s[job] - self.jobs[job].spec.arrival_s for job in sorted(ended_s)},
            completed_s,
            self._cost(completed_s),
            attainment,
            self.controller.rollout.tokens_by_source().get(BASE_MODEL, {}),
            sum(len(uses) > 1 for uses in self._uses.values()),
            self.cores.granted,
            self.engines.deltas,
            self.controller.rollout.state.counters.moved,
            tuple(sorted(self._rented)),
        )

    def _cost(self, completed_s: float) -> float:
        """Nodes while they are rented, spot nodes while they are there, cores all the time."""
        scenario, hours = self.scenario, completed_s / 3600
        cost = sum(
            self._node_s[role] / 3600 * entry.pool(role).node_type.price_per_h
            for role, entry in scenario.pools().items()
        )
        cost += hours * scenario.external.cores * scenario.external.core_price_per_h
        if Slack.SPOT in self.on:
            price = scenario.engine().devices * scenario.spot.device_price_per_h
            cost += instance_hours(self._spot, completed_s) * price
        return cost


def serving_cluster(
    scenario: SlackScenario,
    body: SimulatedInstances,
    seed: int,
    fleet: SimulatedFleet | None = None,
) -> ServingCluster:
    """The serving devices of a scenario, which lend to the jobs of a fleet."""
    lending = None if fleet is None else fleet.controller.lending
    device, nodes = scenario.serving_device(), scenario.serving.nodes
    plan = ClusterPlan(
        device,
        scenario.serving.slo,
        nodes,
        find_mode("none" if fleet is None else "foresight"),
        turns_per_node=scenario.turns_per_device * device.rollout.devices,
        seed=seed,
        holds=None,
    )
    arrivals = scenario.arrivals(seed)
    if fleet is None or lending is None:
        return ServingCluster(plan, body, arrivals, Lender(), lambda event: None)
    return ServingCluster(plan, body, arrivals, lending.lender, fleet.tell)


def serve_alone(scenario: SlackScenario, seed: int, until_s: float) -> ServingCluster:
    """The serving devices of a scenario without a loan: all requests until then are answered."""
    queue: EventQueue[Callable[[], None]] = EventQueue()
    body = SimulatedInstances(queue, lambda turn: 1, lambda event: None)
    cluster = serving_cluster(scenario, body, seed)
    cluster.start()
    while not (cluster.closed and not cluster.unanswered):
        queue.pop()()
        cluster.closed = cluster.closed or queue.now_s > until_s
    return cluster


def instance_hours(trace: Sequence[SpotEvent], until_s: float) -> float:
    """Instance hours of a spot trace up to a moment."""
    since: dict[str, float] = {}
    held_s = 0.0
    for row in trace:
        if row.t_s >= until_s:
            break
        if row.event == "add":
            since[row.instance_id] = row.t_s
        else:
            held_s += row.t_s - since.pop(row.instance_id)
    return (held_s + sum(until_s - began_s for began_s in since.values())) / 3600
