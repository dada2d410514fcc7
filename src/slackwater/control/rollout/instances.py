"""The instances: what each holds, what runs on it, and when it was last heard."""

from collections import Counter
from collections.abc import Iterator

from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.control.rollout.steady_frame import SteadyFrame
from slackwater.control.rollout.waiting_line import NeedKey
from slackwater.model.ids import InstanceId, JobId, TenantId
from slackwater.model.instance import InstanceKind, InstanceSpec, InstanceState
from slackwater.model.turn import AttemptId
from slackwater.policy.rollout.instance_load import InstanceLoad


class InstanceRecord:
    """One instance from joining to gone. `versions` is ordered: least recently used first."""

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
        self.versions: dict[str, None] = {}
        self.pulling: set[str] = set()
        self.attempts: dict[AttemptId, LiveTurn] = {}
        self.owners: Counter[TenantId] = Counter()  # turns of each
        self.owned_tokens: Counter[TenantId] = Counter()  # their contexts, as they were sent
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
        self.steady_frame: SteadyFrame | None = None

    @property
    def state(self) -> InstanceState:
        """Where it stands between joining and gone."""
        if self.draining:
            return InstanceState.DRAINING
        if self.versions:
            return InstanceState.READY
        return InstanceState.PULLING if self.pulling else InstanceState.JOINING

    @property
    def local(self) -> bool:
        """On a training node."""
        return self.spec.kind is InstanceKind.LOCAL

    def refresh(self) -> None:
        """Decide again whether it may be given turns."""
        self.load.accepting = bool(self.versions) and not self.draining and not self.stalled

    def offers(self, owner: TenantId, share: float) -> InstanceLoad:
        """How it looks to an owner who leaves that share of it to others, unless it has less than that."""
        load = self.load
        has_less = (
            self.owners[owner] < load.kept_slots(share)
            and self.owned_tokens[owner] < share * load.kv_tokens
        )
        return load if has_less else load.less(share)

    def serves(self, job: JobId) -> bool:
        """Whether it is not lent to another job."""
        return self.spec.job is None or self.spec.job == job

    def version_for(self, turn: LiveTurn) -> str | None:
        """The newest version it holds that the turn may use."""
        if turn.spec.version in self.versions:
            return turn.spec.version
        return next((v for v in turn.spec.also_versions if v in self.versions), None)

    def use(self, version: str) -> None:
        """Mark the version as just used."""
        del self.versions[version]
        self.versions[version] = None

    def idle_version(self, keep: str) -> str | None:
        """The least recently used version that nothing runs with."""
        busy = {turn.version for turn in self.attempts.values()}
        return next((v for v in self.versions if v != keep and v not in busy), None)


class Instances:
    """All live instances, and for every need the list of those that can meet it."""

    def __init__(self) -> None:
        self.records: dict[InstanceId, InstanceRecord] = {}
        self._eligible: dict[NeedKey, list[InstanceLoad]] = {}
        self._lacking: dict[tuple[JobId, str], list[InstanceRecord]] = {}
        self.shortest_context = 0

    def __iter__(self) -> Iterator[InstanceRecord]:
        return iter(self.records.values())

    def __len__(self) -> int:
        return len(self.records)

    def add(self, record: InstanceRecord) -> None:
        """A new instance."""
        self.records[record.spec.instance] = record
        self.changed()

    def remove(self, instance: InstanceId) -> None:
        """It is gone."""
        del self.records[instance]
        self.changed()

    def changed(self) -> None:
        """Membership, versions or states changed: forget what was derived from them."""
        self._eligible.clear()
        self._lacking.clear()
        self.shortest_context = min((record.spec.max_context_tokens for record in self), default=0)

    def eligible(self, need: NeedKey) -> list[InstanceLoad]:
        """Accepting instances that hold a version the need allows and may serve its job, by id."""
        found = self._eligible.get(need)
        if found is None:
            job, version, also = need
            wanted = {version, *also}
            found = sorted(
                (
                    record.load
                    for record in self
                    if record.load.accepting
                    and record.serves(job)
                    and not wanted.isdisjoint(record.versions)
                ),
                key=lambda load: load.instance,
            )
            self._eligible[need] = found
        return found

    def accepting_for(self, job: JobId) -> list[InstanceRecord]:
        """Instances that live, do not leave, and may serve the job."""
        return [
            record
            for record in self
            if record.serves(job) and not record.draining and not record.stalled
        ]

    def lacking(self, job: JobId, version: str) -> list[InstanceRecord]:
        """Who could pull the version for the job; nobody while one of them is pulling it."""
        found = self._lacking.get((job, version))
        if found is None:
            able = self.accepting_for(job)
            pulled = any(version in record.pulling for record in able)
            found = [] if pulled else [r for r in able if version not in r.versions]
            self._lacking[job, version] = found
        return found
