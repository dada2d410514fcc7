"""The load of an instance, as rollout policies see it. The controller keeps it up to date."""

from dataclasses import dataclass, field, replace

from slackwater.model.ids import InstanceId, JobId
from slackwater.model.instance import OWN_KINDS, InstanceKind
from slackwater.policy.rollout.working_set import Tokens, empty_working_set, peak_tokens


@dataclass(slots=True)
class InstanceLoad:
    """One instance's limits and load.

    `waiting` and `kv_load_tokens` are from its last report; the latter includes turns sent since.
    `residents` is the number of trajectories in its working set, with `resident_tokens` now and
    `expected_tokens` as they grow. `slowness` is its step time relative to that of all instances.
    """

    instance: InstanceId
    kind: InstanceKind
    max_running: int
    kv_tokens: int
    max_context_tokens: int
    job: JobId | None = None
    accepting: bool = False
    in_flight: int = 0
    waiting: int = 0
    kv_load_tokens: int = 0
    residents: int = 0
    resident_tokens: int = 0
    expected_tokens: Tokens = field(default_factory=empty_working_set)
    produced_per_s: float = 0.0
    slowness: float = 1.0
    owned: bool = field(init=False)  # dedicated to rollouts; not borrowed and not preemptible

    def __post_init__(self) -> None:
        self.owned = self.kind in OWN_KINDS  # stored: every decision reads it for every instance

    @property
    def pending(self) -> int:
        """Turns that were sent but do not run yet (RLBoost's m_pending)."""
        return max(self.waiting, self.in_flight - self.max_running, 0)

    @property
    def executing(self) -> int:
        """Turns that run (RLBoost's m_exec)."""
        return self.in_flight - self.pending

    def runs_now(self, context_tokens: int) -> bool:
        """Whether a turn with this context would start at once, as far as is known."""
        return (
            self.accepting
            and self.waiting == 0
            and self.in_flight < self.max_running
            and (self.in_flight == 0 or self.kv_load_tokens + context_tokens <= self.kv_tokens)
        )

    def has_cache_for(self, expected_tokens: Tokens) -> bool:
        """Whether the working set with one more trajectory fits into the cache, now and as contexts
        grow.
        """
        return peak_tokens(self.expected_tokens + expected_tokens) <= self.kv_tokens

    def count_reserved_slots(self, share: float) -> int:
        """The number of slots in this share: at least one, but never all."""
        return max(min(max(int(self.max_running * share), 1), self.max_running - 1), 0)

    def without_share(self, share: float) -> "InstanceLoad":
        """The load as a job sees it that must leave this share of the instance to others."""
        return replace(
            self,
            max_running=self.max_running - self.count_reserved_slots(share),
            kv_tokens=int(self.kv_tokens * (1.0 - share)),
        )

    def may_queue(self, limit: int) -> bool:
        """Whether one more turn may wait there (delayed dispatch: at most `limit` pending)."""
        return self.accepting and self.pending < limit
