"""A fleet in virtual time under the complete fleet controller, with the live limits.

Nodes have an engine and, in the train pool, a trainer; jobs are clients that submit turns and
operations. The same code as in a service infers phases, makes orders wait for devices and permits,
and requests loans. `check_integrity` holds after every event.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from slackwater.control.coschedule import phase_commands
from slackwater.control.coschedule.events import NodeLost
from slackwater.control.coschedule.phase_limits import PhaseLimits
from slackwater.control.coschedule.scheduler import CoScheduler
from slackwater.control.driver import Driver
from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import FleetCommand, FleetEvent
from slackwater.control.lending.lender import LendingController
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.control.timer import TimerFired
from slackwater.control.weights.events import WeightsPublished
from slackwater.model.ids import JobId, NodeId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.placement import Phase, is_within, node_of
from slackwater.sim.core.queue import EventQueue, name_failing_event
from slackwater.sim.fleet.clients import ClientCommand, SimulatedClients
from slackwater.sim.fleet.costs import FleetCosts
from slackwater.sim.fleet.engines import BASE_MODEL, EngineCommand, SimulatedEngines
from slackwater.sim.fleet.job import SimulatedJob, TurnPlan
from slackwater.sim.fleet.serving import ServingCommand, ServingNodes
from slackwater.sim.fleet.trainers import SimulatedTrainers, TrainerCommand
from slackwater.timeline.spans import PermitSpans

# Twelve times the live limits, and heartbeats too, so that most events belong to jobs. Clients
# start while their jobs are still held, so their turns may wait for hours.
SETTINGS = RolloutSettings(lease_s=120.0, stall_s=300.0, watch_every_s=30.0, turn_timeout_s=1e7)


class SimulatedFleet:
    """Holds the queue and the controller; engines, trainers, clients and services execute."""

    controller_type = FleetController

    def __init__(
        self,
        scheduler: CoScheduler,
        specs: Sequence[JobSpec],
        *,
        seed: int = 0,
        plan: TurnPlan | None = None,
        costs: FleetCosts | None = None,
        lengths: Mapping[JobId, JobProfile] | None = None,
        limits: PhaseLimits | None = None,
        unprofiled: frozenset[JobId] = frozenset(),
        supervised: Mapping[JobId, int] | None = None,
        lending: LendingController | None = None,
    ) -> None:
        """`lengths`: real phase lengths of jobs whose declared profiles differ; `supervised`: how
        many steps jobs without rollouts train between two versions.
        """
        self.seed = seed
        self.costs = costs or FleetCosts()
        self.plan = plan or TurnPlan()
        self.rng = np.random.default_rng(seed)
        self.broken_moves = self.broken_pulls = 0.0
        self.scheduler = scheduler
        self.places = set(scheduler.places)
        self.spans = PermitSpans(scheduler.nodes, 0.0)
        self.permits: dict[int, tuple[JobId, Phase, tuple[NodeId, ...]]] = {}
        self.tail_migrations = 0
        self.silent_until_s: dict[NodeId, float] = {}
        self.queue: EventQueue[Callable[[], None]] = EventQueue()
        truth = lengths or {}
        self.jobs = {
            spec.job: SimulatedJob(
                spec,
                number,
                truth.get(spec.job, spec.profile),
                profiled=spec.job not in unprofiled,
            )
            for number, spec in enumerate(specs)
        }
        for name, steps in (supervised or {}).items():
            self.jobs[name].supervised = steps
        self.unsettled = len(self.jobs)
        self.controller = self.controller_type(
            SETTINGS, coscheduler=scheduler, limits=limits, lending=lending
        )
        self.driver: Driver[FleetEvent, FleetCommand] = Driver(
            self.controller,
            self._execute,
            clock=lambda: self.queue.now_s,
            schedule=self.queue.push_soon,
            deliver=self._timer_due,
            handled=self._check_event,
        )
        self.trainers = SimulatedTrainers(self)
        self.serving: ServingNodes | None = None
        self._open()
        self._start()

    def _open(self) -> None:
        """Create the engines and clients; subclasses have their own."""
        self.engines = SimulatedEngines(self)
        self.clients = SimulatedClients(self)

    def _start(self) -> None:
        self.tell(WeightsPublished(0.0, None, "base", BASE_MODEL))
        for place in self.scheduler.places:
            self.engines.start(place)
            if place.startswith("train"):
                self.trainers.start(place)
        if self.serving is not None:
            self.serving.start()
        for job in self.jobs.values():
            self.queue.push(job.spec.arrival_s, partial(self.clients.submit, job))

    # ---- time ----
    @property
    def now_s(self) -> float:
        return self.queue.now_s

    @property
    def events(self) -> int:
        return self.driver.events

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        self.queue.push(self.now_s + max(seconds, 0.0), happen)

    def wait_s(self, mean_s: float) -> float:
        return float(self.rng.exponential(mean_s))

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def run(self, until_s: float = float("inf"), stop: Callable[[], bool] = lambda: False) -> None:
        """Run until every job has ended, `stop()`, or the time limit."""
        while self.unsettled and self.now_s < until_s and not stop():
            assert len(self.queue), f"no event is left for {self.describe_unfinished()}"
            self.queue.pop()()

    def describe_unfinished(self) -> list[str]:
        """The first jobs that have not ended, for error messages."""
        return [
            f"{job.job} (iteration {job.iteration}, {len(job.open_turns)} turns, "
            f"{len(job.open_ops)} operations)"
            for job in self.jobs.values()
            if not job.over
        ][:5]

    # ---- events and commands ----
    def tell(self, *events: FleetEvent) -> None:
        """Feed events that happen together."""
        with name_failing_event(self.driver, self.queue):
            self.driver.feed(*events)

    def _timer_due(self, event: TimerFired) -> None:
        self.driver.feed(event)

    def _execute(self, command: FleetCommand) -> None:
        self._note(command)
        if isinstance(command, EngineCommand):
            self.engines.execute(command)
        elif isinstance(command, TrainerCommand):
            self.trainers.execute(command)
        elif isinstance(command, ClientCommand):
            self.clients.execute(command)
        elif isinstance(command, ServingCommand):
            assert self.serving is not None
            self.serving.execute(command)

    def _note(self, command: FleetCommand) -> None:
        """Collect permits as spans, like the live runtime."""
        match command:
            case phase_commands.PermitGiven(job, permit, phase, _, nodes):
                self.permits[permit] = (job, phase, nodes)
                self.spans.begin(permit, job, phase, nodes, self.now_s)
            case phase_commands.PermitShrunk(_, permit):
                self.tail_migrations += 1
                self.spans.shrink(permit, self.now_s)
            case phase_commands.PermitEnded(_, permit):
                self.permits.pop(permit, None)
                self.spans.end(permit, self.now_s)
            case _:
                pass

    def pace(self) -> float:
        """The speed of a phase beside the others that run now; 1 is full speed."""
        if self.costs.share is None:
            return 1.0
        phases = [phase for _, phase, _ in self.permits.values()]
        return self.costs.share.pace(phases.count(Phase.ROLLOUT), phases.count(Phase.TRAIN))

    # ---- faults ----
    def silent_s(self, node: NodeId) -> float:
        """How much longer a node is unreachable."""
        return max(self.silent_until_s.get(node_of(node), 0.0) - self.now_s, 0.0)

    def lose_node(self, node: NodeId) -> None:
        """The node is lost with its processes; another takes its place."""
        self.engines.lose_node(node)
        self.trainers.lose_node(node, "its node was lost")
        self.tell(NodeLost(self.now_s, node))

    # ---- invariants ----
    def _check_event(self) -> None:
        """Called after every event; checked fleets verify their invariants."""

    def record_start(self, place: NodeId, role: str) -> None:
        """Called when a process of the role starts on a place; checked fleets allocate devices."""

    def check_integrity(self) -> None:
        """Raise AssertionError if work runs without a permit, or an open turn was lost."""
        for record in self.controller.rollout.state.instances:
            place = record.spec.place  # None for instances that need no permit
            for turn in record.attempts.values():
                job = turn.spec.job
                assert self._has_permit(job, Phase.ROLLOUT, place), (
                    f"{job} runs turns on {record.spec.instance} without a permit"
                )
        gates = self.controller.operations.gates()
        for job, phase, nodes in self.permits.values():
            if phase is Phase.TRAIN:
                assert gates.get(job) == nodes, f"{job} trains on {nodes}, gated to {gates}"
        live = self.controller.rollout.state.turns
        for job_run in self.jobs.values():
            lost = {turn for turn in job_run.open_turns if turn not in live}
            assert not lost, f"{job_run.job}: turns were lost: {lost}"
        if self.serving is not None:
            self.serving.check_integrity()

    def check_may_train(self, job: JobId, node: NodeId) -> None:
        """Raise AssertionError if a trainer starts a pass or step without a permit."""
        assert self._has_permit(job, Phase.TRAIN, node), f"{job} trains on {node} without a permit"

    def _has_permit(self, job: JobId, phase: Phase, place: NodeId | None) -> bool:
        """Whether the job has a permit for the place (None: any), or needs none."""
        return self._is_free(job) or any(
            (holder, held_phase) == (job, phase)
            and (place is None or any(is_within(place, node) for node in nodes))
            for holder, held_phase, nodes in self.permits.values()
        )

    def _is_free(self, job: JobId) -> bool:
        """Whether the job needs no permits."""
        phases = self.controller.phases
        return phases is None or phases.find(job) is None
