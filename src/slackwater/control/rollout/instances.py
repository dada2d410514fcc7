"""The instances: weight versions, attempts, load, working set and last sign of life of each."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from slackwater.control.rollout.frame_buffer import FrameBuffer
from slackwater.control.rollout.gates import Gates
from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.control.rollout.turn_queue import NeedKey
from slackwater.model.ids import InstanceId, JobId, TenantId
from slackwater.model.instance import InstanceKind, InstanceSpec, InstanceState
from slackwater.policy.rollout.instance_load import InstanceLoad
from slackwater.policy.rollout.start_order import PromptKey
from slackwater.policy.rollout.step_time import Slowness
from slackwater.policy.rollout.working_set import ContextGrowth, Tokens


class ShareClock:
    """Runs at 1 / (turns on the engine): its gain during a turn is the turn's share of time."""

    __slots__ = ("_at_s", "_turns", "_value_s")

    def __init__(self, now_s: float) -> None:
        self._at_s, self._turns, self._value_s = now_s, 0, 0.0

    def read(self, now_s: float, change: int) -> float:
        """Return its value now; from now on `change` more turns run."""
        if self._turns:
            self._value_s += (now_s - self._at_s) / self._turns
        self._at_s, self._turns = now_s, self._turns + change
        return self._value_s


class InstanceRecord:
    """One instance. Turns start on its `versions`; those on a `recalled` one may finish."""

    def __init__(self, spec: InstanceSpec, now_s: float) -> None:
        self.spec = spec
        self.load = InstanceLoad(
            spec.instance,
            spec.kind,
            spec.max_running,
            spec.kv_tokens,
            spec.max_context_tokens,
            spec.job,
        )
        self.versions: set[str] = set()
        self.recalled: set[str] = set()
        self.clock = ShareClock(now_s)
        self.attempts: dict[int, LiveTurn] = {}
        self.frames = FrameBuffer(self.attempts)
        self.owners: Counter[TenantId] = Counter()  # attempts by owner
        self.owned_tokens: Counter[TenantId] = Counter()  # their contexts when dispatched
        self.residents: dict[int, CacheHome] = {}  # its working set, by age
        self.joined_s = now_s
        self.heard_s = now_s
        self.progress_s = now_s
        self.produced_tokens = 0
        self.prefilled_tokens = 0
        self.reported_s: float | None = None
        self.reported_running = 0
        self.reported_kv_tokens = 0
        self.faults = 0
        self.draining = False
        self.leaves_at_s: float | None = None
        self.stalled = False
        self.slowness = Slowness()

    @property
    def state(self) -> InstanceState:
        """Its lifecycle state."""
        if self.draining:
            return InstanceState.DRAINING
        return InstanceState.READY if self.versions else InstanceState.JOINING

    @property
    def is_local(self) -> bool:
        """Whether it runs on a training node."""
        return self.spec.kind is InstanceKind.LOCAL

    def refresh(self) -> None:
        """Update whether it accepts turns."""
        self.load.accepting = bool(self.versions) and not self.draining and not self.stalled

    def load_for(self, owner: TenantId, share: float) -> InstanceLoad:
        """Its load as an owner may use it, who leaves `share` free while it holds more."""
        load = self.load
        has_less = (
            self.owners[owner] < load.count_reserved_slots(share)
            and self.owned_tokens[owner] < share * load.kv_tokens
        )
        return load if has_less else load.without_share(share)

    def version_for(self, turn: LiveTurn) -> str | None:
        """The version that the turn runs with here, or None."""
        if turn.spec.version in self.versions:
            return turn.spec.version
        return next((v for v in turn.spec.also_versions if v in self.versions), None)

    def find_unused_recalled(self) -> list[str]:
        """Recalled versions that no attempt uses."""
        busy = {turn.version for turn in self.attempts.values()}
        return sorted(self.recalled - busy)


@dataclass(slots=True)
class CacheHome:
    """A trajectory that has had a turn: where it ran last, and the tokens it counts there.

    `record` is the instance itself, not its name, because an instance that joins again has an empty
    cache. `number` orders trajectories by arrival. `open_turns` were submitted and have not ended.
    `stage` counts the checks since its last turn of whether it still lives.
    """

    number: int
    prompt: PromptKey
    growth: ContextGrowth
    context_tokens: int
    before_tokens: int
    open_turns: int = 0
    record: InstanceRecord | None = None
    began_s: float = 0.0
    seen_s: float = 0.0
    ended: bool = False
    stage: int = 0
    counted_tokens: int = 0
    expected: Tokens | None = None

    @property
    def is_resident(self) -> bool:
        """Whether it is in the working set of its instance."""
        return self.expected is not None

    def count(self, alive: float = 1.0) -> None:
        """Count it in its instance's working set, weighted by the probability that it lives."""
        assert self.record is not None
        self.leave()
        load = self.record.load
        self.expected = self.growth.forecast_tokens(self.context_tokens, alive)
        self.counted_tokens = int(self.expected[0, 0])
        self.record.residents[self.number] = self
        load.residents += 1
        load.resident_tokens += self.counted_tokens
        load.expected_tokens += self.expected

    def revive(self) -> None:
        """Undo its inferred end: it had a turn again."""
        if self.ended:
            self.ended = False
            self.growth.undo_end(self.context_tokens)

    def leave(self) -> None:
        """Leave the working set."""
        if self.record is None or self.expected is None:
            return
        load = self.record.load
        del self.record.residents[self.number]
        load.residents -= 1
        load.resident_tokens -= self.counted_tokens
        load.expected_tokens -= self.expected
        self.counted_tokens, self.expected = 0, None


class Instances:
    """All live instances, and cached lists of those that are eligible for a need."""

    def __init__(self) -> None:
        self.records: dict[InstanceId, InstanceRecord] = {}
        self.gates = Gates()
        self._eligible: dict[NeedKey, list[InstanceLoad]] = {}
        self._longest: dict[tuple[JobId, str], int | None] = {}
        self.recalling: set[InstanceId] = set()
        self.shortest_context = 0
        self.longest_context = 0

    def __iter__(self) -> Iterator[InstanceRecord]:
        return iter(self.records.values())

    def __len__(self) -> int:
        return len(self.records)

    def add(self, record: InstanceRecord) -> None:
        self.records[record.spec.instance] = record
        self.invalidate()

    def remove(self, instance: InstanceId) -> None:
        del self.records[instance]
        self.recalling.discard(instance)
        self.invalidate()

    def invalidate(self) -> None:
        """Clear what was derived from membership, versions and states, after one changed."""
        self._eligible.clear()
        self._longest.clear()
        contexts = [record.spec.max_context_tokens for record in self]
        self.shortest_context = min(contexts, default=0)
        self.longest_context = max(contexts, default=self.longest_context)

    def longest_for(self, job: JobId, base_model: str) -> int | None:
        """The longest context of the instances that serve the job, or None."""
        key = (job, base_model)
        if key not in self._longest:
            able = (r.spec.max_context_tokens for r in self if r.spec.serves(job, base_model))
            self._longest[key] = max(able, default=None)
        return self._longest[key]

    def eligible(self, need: NeedKey) -> list[InstanceLoad]:
        """Accepting instances with a version of the need that may serve its job: owned ones first,
        then by id.
        """
        found = self._eligible.get(need)
        if found is None:
            job, base_model, version, also = need
            wanted = {version, *also}
            found = sorted(
                (
                    record.load
                    for record in self
                    if record.load.accepting
                    and record.spec.serves(job, base_model)
                    and self.gates.admits(job, record.spec)
                    and not wanted.isdisjoint(record.versions)
                ),
                key=lambda load: (not load.owned, load.instance),
            )
            self._eligible[need] = found
        return found
