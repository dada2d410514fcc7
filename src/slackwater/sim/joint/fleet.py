"""A fleet in virtual time under the co-scheduler and the brain: phases, turns and versions in one event queue.

A job's rollout permit lets its engines join on the nodes it covers; its turns are then the rollout manager's, and its versions the
weight director's. Its train permit lets its trainer ask the step book for the devices. Long-tail migration drains some of the engines, and
the next job's come to the freed nodes while the rest of the turns go on. After every event the invariants of all controllers are checked, and
those between them: no engine works, and no trainer trains, on a node that no permit gives its job.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from slackwater.control.brain import Brain, BrainCommand, BrainEvent
from slackwater.control.coschedule import commands as of_phase
from slackwater.control.coschedule import phase_commands as phase_do
from slackwater.control.coschedule.phase_limits import PhaseLimits
from slackwater.control.coschedule.scheduler import CoScheduler
from slackwater.control.jobs.events import JobSubmitted
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.control.timer import SetTimer
from slackwater.model.ids import InstanceId, JobId, NodeId, TenantId, TurnId
from slackwater.model.job import JobProfile, JobSpec, JobTerms
from slackwater.model.placement import Phase
from slackwater.sim.core.queue import EventQueue
from slackwater.sim.joint.brain_body import BrainBody
from slackwater.sim.joint.costs import JointCosts
from slackwater.sim.joint.job_run import JobRun, TurnPlan
from slackwater.sim.joint.phase_body import PhaseBody
from slackwater.sim.rollout.storm_instance import StormInstance
from slackwater.timeline.permit_spans import PermitSpans

TENANT = TenantId("fleet")
# Turns wait for permits of other jobs too, so their own deadlines are far away.
SETTINGS = RolloutSettings(
    lease_s=120.0, stall_s=1e6, turn_timeout_s=1e7, watch_every_s=30.0, barren_losses=1000
)
# Nodes are silent for minutes here; jobs that are cut off come back by themselves.
LIMITS = PhaseLimits(lease_s=1e7, least_s=1e7, unknown_s=1e7, rest_s=1e7)


class JointFleet:
    """Holds the queue and the brain; `BrainBody` and `PhaseBody` carry out what they say."""

    def __init__(
        self,
        scheduler: CoScheduler,
        specs: Sequence[JobSpec],
        *,
        seed: int = 0,
        plan: TurnPlan | None = None,
        costs: JointCosts | None = None,
        lengths: Mapping[JobId, JobProfile] | None = None,
        check: bool = True,
    ) -> None:
        """`lengths`: what phases take, of jobs whose owners said something else."""
        self.seed = seed
        self.costs = costs or JointCosts()
        self.spans = PermitSpans(scheduler.nodes, 0.0)
        self.rng = np.random.default_rng(seed)
        self.queue: EventQueue[Callable[[], None]] = EventQueue()
        self.brain = Brain(SETTINGS, shared_devices=False, coscheduler=scheduler, limits=LIMITS)
        self.scheduler = scheduler
        self.plan = plan or TurnPlan()
        truth = lengths or {}
        self.runs = {
            spec.job: JobRun(spec, number, truth.get(spec.job, spec.profile))
            for number, spec in enumerate(specs)
        }
        self.instances: dict[InstanceId, StormInstance] = {}
        self.node_of: dict[InstanceId, NodeId] = {}
        self.permits: dict[int, tuple[JobId, Phase, tuple[NodeId, ...]]] = {}
        self.silent_until_s: dict[NodeId, float] = {}
        self.rented: set[NodeId] = set()
        self.events = 0
        self.unsettled = len(self.runs)
        self._check = check
        self._inbox: list[BrainEvent] = []
        self._handling = False
        self.turns = BrainBody(self)
        self.phases = PhaseBody(self)
        for spec in specs:
            self.queue.push(spec.arrival_s, partial(self.arrives, self.runs[spec.job]))

    @property
    def now_s(self) -> float:
        return self.queue.now_s

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        self.queue.push(self.now_s + max(seconds, 0.0), happen)

    def run(self, until_s: float = float("inf"), stop: Callable[[], bool] = lambda: False) -> None:
        """Until every job has settled, `stop()`, or the time is over."""
        while self.unsettled and self.now_s < until_s and not stop():
            assert len(self.queue), f"jobs wait for ever: {self.stuck()}"
            self.queue.pop()()

    def stuck(self) -> list[str]:
        """Jobs that are not over, in words."""
        return [
            f"{run.job} ({run.phase}, {len(run.open_turns)} turns)"
            for run in self.runs.values()
            if not run.over
        ][:5]

    def arrives(self, run: JobRun) -> None:
        """A job's owner submits it."""
        terms = JobTerms(run.spec.iterations, run.spec.slo)
        self.tell(JobSubmitted(self.now_s, run.job, TENANT, run.spec.profile, terms))

    def tell(self, event: BrainEvent) -> None:
        """Something happened."""
        self._inbox.append(event)
        self._handle()

    def tell_all(self, events: Sequence[BrainEvent]) -> None:
        """As one thing that happened."""
        self._inbox += events
        self._handle()

    def _handle(self) -> None:
        """One after the other, whatever follows from each; the invariants in between."""
        if self._handling:
            return
        self._handling = True
        while self._inbox:
            self._take(self._inbox.pop(0))
        self._handling = False

    def _take(self, event: BrainEvent) -> None:
        self.events += 1
        try:
            for command in self.brain.handle(event):
                self._draw(command)
                if isinstance(command, of_phase.Command) and not isinstance(command, SetTimer):
                    self.phases.obey(command)
                else:
                    self.turns.obey(command)
            if self._check:
                self.brain.check_integrity()
                if not self._inbox:  # all that follows from one thing has happened
                    self.check_integrity()
        except Exception as error:  # a controller that raises has broken its word too
            at = f"event {self.events}, {type(event).__name__}, {self.now_s:.1f} s"
            raise AssertionError(f"{error or type(error).__name__} ({at})") from error

    def _draw(self, command: BrainCommand) -> None:
        """Permits as stretches of time, collected as the live body collects them."""
        match command:
            case phase_do.PermitGiven(job, permit, phase, _, nodes):
                self.spans.given(permit, job, phase, nodes, self.now_s)
            case phase_do.PermitShrunk(_, permit):
                self.spans.shrunk(permit, self.now_s)
            case phase_do.PermitBack(_, permit):
                self.spans.back(permit, self.now_s)
            case _:
                pass

    def pace(self) -> float:
        """How much of a second's work a phase does now in a second, beside the others that run."""
        if self.costs.share is None:
            return 1.0
        phases = [phase for _, phase, _ in self.permits.values()]
        return self.costs.share.pace(phases.count(Phase.ROLLOUT), phases.count(Phase.TRAIN))

    def silent(self, node: NodeId) -> float:
        """For how much longer nothing is heard of a node."""
        return max(self.silent_until_s.get(node, 0.0) - self.now_s, 0.0)

    def tokens_of(self, turn: TurnId) -> int:
        return self.turns.hidden[turn]

    def check_integrity(self) -> None:
        """The invariants between the controllers; each one's own are checked after every event."""
        allowed = {
            (job, node) for job, phase, nodes in self.permits.values() for node in nodes
            if phase is Phase.ROLLOUT
        }  # fmt: skip
        for record in self.brain.rollout.books.instances:
            job, node = record.spec.job, self.node_of[record.spec.instance]
            assert job is not None
            if record.attempts:
                assert (job, node) in allowed, f"{job} runs turns on {node} without a permit"
        for trainer, holder in self.brain.steps.holders().items():
            assert holder is not None
            run = self.runs[holder]
            held = run.permit is not None and self.permits[run.permit][1] is Phase.TRAIN
            assert held, f"{trainer} trains without a permit"
        for run in self.runs.values():
            live = {t for t in run.open_turns if t in self.brain.rollout.books.turns}
            assert live == run.open_turns, f"{run.job}: turns were lost"
