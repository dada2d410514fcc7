"""Recent trajectories with every token and log-prob, for the dashboard and the API.

Turns that share a prompt share its memory.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slackwater.control.rollout.commands import CompleteTurn
from slackwater.model.ids import JobId, TrajectoryId
from slackwater.model.turn import TurnSpec

_OF_A_JOB = 24
_OF_A_WATCHED_JOB = 512  # so that what a person was shown is still there when they open it
_WATCHED_S = 60.0
_MAX_TOKENS = 100_000
_AT_ONCE = 16  # short turns are added together, which takes half as long as one after the other
_SHORT_TOKENS = 1000
_TURN_TOKENS = 64  # a turn takes the memory of so many more: its objects are larger than they
NOT_SAMPLED = float("nan")  # the log-prob of a token that a client wrote


@dataclass(slots=True)
class EndedTurn:
    """A prompt, and what was sampled after it."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]

    @property
    def held_tokens(self) -> int:
        return len(self.prompt) + len(self.tokens) + _TURN_TOKENS


@dataclass(slots=True)
class RecentTrajectory:
    """Turns of one trajectory, oldest first; each prompt begins with all that was before it."""

    trajectory: TrajectoryId
    job: JobId
    base_model: str
    began_s: float
    ended_s: float = 0.0
    version: str = ""
    moves: int = 0
    turns: list[EndedTurn] = field(default_factory=list)
    held_tokens: int = 0

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)


def join_turns(turns: Iterable[EndedTurn]) -> tuple["array[int]", "array[float]"]:
    """The whole conversation: tokens, and a log-prob for each that was sampled."""
    tokens, logprobs = array("I"), array("d")
    for turn in turns:
        known = len(tokens)
        if list(turn.prompt[:known]) != tokens.tolist():
            known = 0  # the client began anew
            tokens, logprobs = array("I"), array("d")
        more = turn.prompt[known:]
        tokens.extend(more)
        logprobs.extend([NOT_SAMPLED] * len(more))
        tokens.extend(turn.tokens)
        logprobs.extend(turn.logprobs)
    return tokens, logprobs


class RecentTrajectories:
    """The last trajectories of every job, within limits on their number and their tokens."""

    def __init__(self, of_a_job: int = _OF_A_JOB, max_tokens: int = _MAX_TOKENS) -> None:
        self._of_a_job, self._max_tokens = of_a_job, max_tokens
        # By job as well: a job may continue a conversation of another, as a trajectory of its own.
        self._trajectories: OrderedDict[tuple[JobId, TrajectoryId], RecentTrajectory] = (
            OrderedDict()
        )
        self._by_job: dict[JobId, deque[TrajectoryId]] = {}
        self._looked_at_s: dict[JobId, float] = {}
        self._tokens = 0
        self._unsorted: list[tuple[TurnSpec, CompleteTurn, float, float]] = []

    @property
    def held_tokens(self) -> int:
        self._sort()
        return self._tokens

    def record_turn(
        self, spec: TurnSpec, result: CompleteTurn, since_s: float, now_s: float
    ) -> None:
        """Add a complete turn to its trajectory, together with others or when somebody looks."""
        self._unsorted.append((spec, result, since_s, now_s))
        if len(self._unsorted) == _AT_ONCE or len(result.tokens) > _SHORT_TOKENS:
            self._sort()

    def _sort(self) -> None:
        ended, self._unsorted = self._unsorted, []
        for turn in ended:
            self._add(*turn)

    def _add(self, spec: TurnSpec, result: CompleteTurn, since_s: float, now_s: float) -> None:
        key = (spec.job, spec.trajectory)
        found = self._trajectories.get(key)
        if found is None:
            found = RecentTrajectory(spec.trajectory, spec.job, spec.base_model, since_s)
            self._trajectories[key] = found
            of_job = self._by_job.setdefault(spec.job, deque())
            of_job.append(spec.trajectory)
            while len(of_job) > self._of_a_job and len(of_job) > self._most(spec.job, now_s):
                self._drop((spec.job, of_job[0]))
        else:
            self._trajectories.move_to_end(key)
        turn = EndedTurn(spec.prompt, array("I", result.tokens), array("d", result.logprobs))
        held_tokens = turn.held_tokens
        found.turns.append(turn)
        found.held_tokens += held_tokens
        found.ended_s, found.version = now_s, result.version
        found.moves += result.moves
        self._tokens += held_tokens
        while self._tokens > self._max_tokens and self._trajectories:
            self._drop(next(iter(self._trajectories)))

    def _most(self, job: JobId, now_s: float) -> int:
        looked_at_s = self._looked_at_s.get(job)
        if looked_at_s is None:
            return self._of_a_job
        if now_s - looked_at_s > _WATCHED_S:
            del self._looked_at_s[job]
            return self._of_a_job
        return _OF_A_WATCHED_JOB

    def trajectories_of(self, job: JobId, now_s: float) -> list[RecentTrajectory]:
        """A job's trajectories, slowest first; more of them are kept for the next minute."""
        self._sort()
        if job in self._by_job:
            self._looked_at_s[job] = now_s
        found = [self._trajectories[job, name] for name in self._by_job.get(job, ())]
        return sorted(found, key=lambda found: found.began_s - found.ended_s)

    def find(self, job: JobId, trajectory: str) -> RecentTrajectory | None:
        self._sort()
        return self._trajectories.get((job, TrajectoryId(trajectory)))

    def _drop(self, key: tuple[JobId, TrajectoryId]) -> None:
        gone = self._trajectories.pop(key)
        self._tokens -= gone.held_tokens
        of_job = self._by_job[gone.job]
        of_job.remove(gone.trajectory)
        if not of_job:
            del self._by_job[gone.job]
            self._looked_at_s.pop(gone.job, None)
