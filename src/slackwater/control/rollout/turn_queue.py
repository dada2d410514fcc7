"""Queued turns: first come, first served within each need of each owner."""

from collections import OrderedDict
from collections.abc import Callable, Iterator

from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.model.ids import InstanceId, JobId, TenantId, TurnId

# Turns with equal needs are eligible for the same instances: if the first has no room, none has.
NeedKey = tuple[JobId, str, str, tuple[str, ...]]


def need_key(turn: LiveTurn) -> NeedKey:
    """What decides which instances are eligible: job, base model and versions."""
    spec = turn.spec
    return (spec.job, spec.base_model, spec.version, tuple(spec.also_versions))


# Need, owner, whether only exact engines may continue, whether the trajectory has started.
_QueueKey = tuple[NeedKey, TenantId, bool, bool]


class TurnQueue:
    """FIFO per need and owner, and per instance for turns bound to one instance."""

    def __init__(self) -> None:
        self._by_need: dict[_QueueKey, OrderedDict[TurnId, LiveTurn]] = {}
        self._by_instance: dict[InstanceId, OrderedDict[TurnId, LiveTurn]] = {}
        self._queue_keys: dict[TurnId, _QueueKey | InstanceId] = {}

    def __len__(self) -> int:
        return len(self._queue_keys)

    def __contains__(self, turn: TurnId) -> bool:
        return turn in self._queue_keys

    def add(
        self,
        turn: LiveTurn,
        *,
        first: bool,
        started: bool = False,
        bound_to: InstanceId | None = None,
    ) -> None:
        """Queue a turn: in front if `first`; for the instance `bound_to` only, if given."""
        name = turn.spec.turn
        if bound_to is not None:
            self._queue_keys[name] = bound_to
            queue = self._by_instance.setdefault(bound_to, OrderedDict())
        else:
            key = (need_key(turn), turn.spec.owner, turn.must_continue, started)
            self._queue_keys[name] = key
            queue = self._by_need.setdefault(key, OrderedDict())
        queue[name] = turn
        if first:
            queue.move_to_end(name, last=False)

    def remove(self, turn: LiveTurn) -> None:
        """Remove a turn, if it is queued."""
        key = self._queue_keys.pop(turn.spec.turn, None)
        if isinstance(key, tuple):
            del self._by_need[key][turn.spec.turn]
            if not self._by_need[key]:
                del self._by_need[key]
        elif key is not None:
            del self._by_instance[key][turn.spec.turn]
            if not self._by_instance[key]:
                del self._by_instance[key]

    def heads(self) -> Iterator[tuple[bool, LiveTurn]]:
        """The first turn of every need and owner, and whether its trajectory has started."""
        for key, queue in self._by_need.items():
            yield key[3], next(iter(queue.values()))

    def reorder_new(self, order: Callable[[list[LiveTurn]], list[LiveTurn]]) -> None:
        """Order the turns of trajectories that have not started, per need and owner."""
        for key, queue in self._by_need.items():
            if not key[3] and len(queue) > 1:
                before = list(queue.values())
                if (after := order(before)) != before:
                    for turn in after:
                        queue.move_to_end(turn.spec.turn)

    def turns_bound_to(self, instance: InstanceId) -> list[LiveTurn]:
        """The turns that wait for this instance only, oldest first."""
        return list(self._by_instance.get(instance, {}).values())

    def first_bound_to(self, instance: InstanceId) -> LiveTurn | None:
        """The oldest turn that waits for this instance only, or None."""
        queue = self._by_instance.get(instance)
        return next(iter(queue.values())) if queue else None

    def check_integrity(self) -> None:
        """Raise AssertionError unless every turn is in one queue and no queue is empty."""
        queues = [*self._by_need.items(), *self._by_instance.items()]
        stand = [(name, key) for key, queue in queues for name in queue]
        assert len(stand) == len(self._queue_keys)
        assert dict(stand) == self._queue_keys
        assert all(queue for _, queue in queues)
