"""What the processes of a simulated fleet share: time, chance, permits, and the controller."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from slackwater.control.coschedule import commands
from slackwater.control.coschedule.phase_watch import PhaseLimits
from slackwater.control.coschedule.scheduler import CoScheduler
from slackwater.control.driver import Driver
from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import FleetCommand, FleetEvent
from slackwater.control.lending.lender import LendingController
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.control.timer import TimerFired
from slackwater.model.ids import JobId, NodeId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.placement import Phase, is_within, node_of
from slackwater.sim.core.queue import EventQueue, name_failing_event
from slackwater.sim.fleet.costs import FleetCosts
from slackwater.sim.fleet.job import SimulatedJob, TurnPlan
from slackwater.timeline.spans import PermitSpans

# Twelve times the live limits, and heartbeats too, so that most events belong to jobs. Clients
# start while their jobs are still held, so their turns may wait for hours.
SETTINGS = RolloutSettings(lease_s=120.0, stall_s=300.0, watch_every_s=30.0, turn_timeout_s=1e7)


class FleetContext(ABC):
    """Holds the queue and the controller; subclasses execute its commands."""

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
        self.deleted_versions: set[str] = set()
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
        self._open()
        self._start()

    @abstractmethod
    def _open(self) -> None:
        """Create the processes; kinds of fleets have their own."""

    @abstractmethod
    def _start(self) -> None:
        """Start the processes and submit the jobs."""

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

    # ---- events and commands ----
    def tell(self, *events: FleetEvent) -> None:
        """Feed events that happen together."""
        with name_failing_event(self.driver, self.queue):
            self.driver.feed(*events)

    def _timer_due(self, event: TimerFired) -> None:
        self.driver.feed(event)

    @abstractmethod
    def _execute(self, command: FleetCommand) -> None:
        """Have the process that it is meant for execute a command."""

    def _note(self, command: FleetCommand) -> None:
        """Collect permits as spans, like the live runtime."""
        match command:
            case commands.PermitGiven(job, permit, phase, _, nodes):
                self.permits[permit] = (job, phase, nodes)
                self.spans.begin(permit, job, phase, nodes, self.now_s)
            case commands.PermitShrunk(_, permit):
                self.tail_migrations += 1
                self.spans.shrink(permit, self.now_s)
            case commands.PermitEnded(_, permit):
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

    # ---- faults and invariants ----
    def silent_s(self, node: NodeId) -> float:
        """How much longer a node is unreachable."""
        return max(self.silent_until_s.get(node_of(node), 0.0) - self.now_s, 0.0)

    @abstractmethod
    def _check_event(self) -> None:
        """Called after every event."""

    @abstractmethod
    def record_start(self, place: NodeId, role: str) -> None:
        """Called when a process of the role starts on a place."""

    def has_permit(self, job: JobId, phase: Phase, place: NodeId | None) -> bool:
        """Whether the job has a permit for the place (None: any), or needs none."""
        phases = self.controller.phases
        if phases is None or phases.find(job) is None:
            return True
        return any(
            (holder, held_phase) == (job, phase)
            and (place is None or any(is_within(place, node) for node in nodes))
            for holder, held_phase, nodes in self.permits.values()
        )
