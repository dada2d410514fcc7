"""Turns that wait for room, first come first served within each kind of need of each owner."""

from collections import OrderedDict
from collections.abc import Iterator

from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.model.ids import InstanceId, JobId, TenantId, TurnId

# Turns with equal needs can run on the same instances: if the first finds no room, none does.
NeedKey = tuple[JobId, str, str, tuple[str, ...]]


def need_key(turn: LiveTurn) -> NeedKey:
    """What decides which instances are eligible: job, base model, version and older ones."""
    spec = turn.spec
    return (spec.job, spec.base_model, spec.version, tuple(spec.also_versions))


# Of one owner; of those that only exact engines may go on with, or not; of started trajectories.
_LineKey = tuple[NeedKey, TenantId, bool, bool]


class TurnQueue:
    """FIFO per need and owner; a turn that only one instance will do for is in that one's line."""

    def __init__(self) -> None:
        self._by_need: dict[_LineKey, OrderedDict[TurnId, LiveTurn]] = {}
        self._by_instance: dict[InstanceId, OrderedDict[TurnId, LiveTurn]] = {}
        self._line_of: dict[TurnId, _LineKey | InstanceId] = {}

    def __len__(self) -> int:
        return len(self._line_of)

    def __contains__(self, turn: TurnId) -> bool:
        return turn in self._line_of

    def add(
        self,
        turn: LiveTurn,
        *,
        first: bool,
        started: bool = False,
        bound_to: InstanceId | None = None,
    ) -> None:
        """Let it wait: in front if `first`; for `bound_to` alone if given."""
        name = turn.spec.turn
        if bound_to is not None:
            self._line_of[name] = bound_to
            line = self._by_instance.setdefault(bound_to, OrderedDict())
        else:
            key = (need_key(turn), turn.spec.owner, turn.must_continue, started)
            self._line_of[name] = key
            line = self._by_need.setdefault(key, OrderedDict())
        line[name] = turn
        if first:
            line.move_to_end(name, last=False)

    def remove(self, turn: LiveTurn) -> None:
        """It waits no more."""
        key = self._line_of.pop(turn.spec.turn, None)
        if isinstance(key, tuple):
            del self._by_need[key][turn.spec.turn]
            if not self._by_need[key]:
                del self._by_need[key]
        elif key is not None:
            del self._by_instance[key][turn.spec.turn]
            if not self._by_instance[key]:
                del self._by_instance[key]

    def heads(self) -> Iterator[tuple[bool, LiveTurn]]:
        """The first of every owner's need, with whether its trajectory has started."""
        for key, line in self._by_need.items():
            yield key[3], next(iter(line.values()))

    def bound_to(self, instance: InstanceId) -> list[LiveTurn]:
        """Those that wait for this instance alone, first come first."""
        return list(self._by_instance.get(instance, {}).values())

    def first_bound_to(self, instance: InstanceId) -> LiveTurn | None:
        """The first of those that wait for this instance alone."""
        line = self._by_instance.get(instance)
        return next(iter(line.values())) if line else None

    def check_integrity(self) -> None:
        """Every waiting turn stands in exactly one line, and no line is empty."""
        lines = [*self._by_need.items(), *self._by_instance.items()]
        stand = [(name, key) for key, line in lines for name in line]
        assert len(stand) == len(self._line_of)
        assert dict(stand) == self._line_of
        assert all(line for _, line in lines)
