"""The state that the parts of the rollout manager share."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from slackwater.control.rollout.commands import ReportFault, RolloutCommand
from slackwater.control.rollout.instances import Instances
from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.model.ids import InstanceId, JobId, TurnId
from slackwater.model.instance import InstanceKind
from slackwater.policy.rollout.plateau import ThroughputProfile
from slackwater.policy.rollout.response_lengths import ResponseLengths
from slackwater.policy.rollout.step_time import StepTimeFit


@dataclass(slots=True)
class RolloutCounters:
    """Totals since the manager started."""

    submitted: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    moved: int = 0
    late_tokens: int = 0
    accepted_tokens: int = 0
    faults: int = 0
    # of completed turns, by base model and kind of the last instance
    tokens: Counter[tuple[str, InstanceKind]] = field(default_factory=Counter)


@dataclass(slots=True)
class JobWork:
    """A job's live and ended turns, when the last ended, and the base models of all of them.

    Kept while a turn lives, and from the job's first step on.
    """

    live_turns: int = 0
    base_models: set[str] = field(default_factory=set)
    steps: bool = False
    closed_turns: int = 0
    done_tokens: int = 0
    closed_s: float = 0.0


@dataclass(slots=True)
class ManagerState:
    """The state of the rollout manager."""

    settings: RolloutSettings
    instances: Instances = field(default_factory=Instances)
    turns: dict[TurnId, LiveTurn] = field(default_factory=dict)
    deadlines: list[tuple[float, int, TurnId]] = field(default_factory=list)
    counters: RolloutCounters = field(default_factory=RolloutCounters)
    profile: ThroughputProfile = field(default_factory=ThroughputProfile)
    step_time: StepTimeFit = field(default_factory=StepTimeFit)
    lengths: ResponseLengths = field(default_factory=ResponseLengths)
    work: defaultdict[JobId, JobWork] = field(default_factory=lambda: defaultdict(JobWork))
    now_s: float = 0.0  # of the current event
    out: list[RolloutCommand] = field(default_factory=list)  # the commands that answer it

    def forget_work(self, job: JobId) -> None:
        """Drop a job's work unless it has live turns or steps."""
        work = self.work.get(job)
        if work is not None and not (work.live_turns or work.steps):
            del self.work[job]

    def report(self, instance: InstanceId, what: str) -> None:
        """Report a fault to the operator."""
        self.counters.faults += 1
        self.out.append(ReportFault(instance, what))
