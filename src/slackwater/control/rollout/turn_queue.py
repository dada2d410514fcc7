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


# Of one owner, and of those that only exact engines may go on with, or not.
_LineKey = tuple[NeedKey, TenantId, bool]


def _line_key(turn: LiveTurn) -> _LineKey:
    return (need_key(turn), turn.spec.owner, turn.must_continue)


class TurnQueue:
    """FIFO per need and owner; a turn is also in the line of the instance that it prefers."""

    def __init__(self) -> None:
        self._by_need: dict[_LineKey, OrderedDict[TurnId, LiveTurn]] = {}
        self._by_instance: dict[InstanceId, OrderedDict[TurnId, LiveTurn]] = {}
        self._preferred: dict[TurnId, InstanceId] = {}
        self._bound: set[TurnId] = set()
        self._turns: dict[TurnId, LiveTurn] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, turn: TurnId) -> bool:
        return turn in self._turns

    def add(
        self, turn: LiveTurn, *, first: bool, prefers: InstanceId | None, bound: bool = False
    ) -> None:
        """Let it wait: in front if `first`; for `prefers` alone if `bound`."""
        name = turn.spec.turn
        self._turns[name] = turn
        if prefers is not None:
            self._preferred[name] = prefers
            self._push(self._by_instance.setdefault(prefers, OrderedDict()), turn, first)
        if bound and prefers is not None:
            self._bound.add(name)
        else:
            key = _line_key(turn)
            self._push(self._by_need.setdefault(key, OrderedDict()), turn, first)

    @staticmethod
    def _push(line: OrderedDict[TurnId, LiveTurn], turn: LiveTurn, first: bool) -> None:
        line[turn.spec.turn] = turn
        if first:
            line.move_to_end(turn.spec.turn, last=False)

    def remove(self, turn: LiveTurn) -> None:
        """It waits no more."""
        name = turn.spec.turn
        if self._turns.pop(name, None) is None:
            return
        preferred = self._preferred.pop(name, None)
        if preferred is not None:
            line = self._by_instance[preferred]
            del line[name]
            if not line:
                del self._by_instance[preferred]
        if name in self._bound:
            self._bound.discard(name)
            return
        key = _line_key(turn)
        del self._by_need[key][name]
        if not self._by_need[key]:
            del self._by_need[key]

    def preferring(self, instance: InstanceId) -> tuple[LiveTurn, LiveTurn] | None:
        """The first and the last to come of those that prefer this instance."""
        line = self._by_instance.get(instance)
        if not line:
            return None
        return next(iter(line.values())), next(reversed(line.values()))

    def heads(self) -> Iterator[LiveTurn]:
        """The first of every owner's need."""
        for line in self._by_need.values():
            yield next(iter(line.values()))

    def bound_to(self, instance: InstanceId) -> list[LiveTurn]:
        """Those that wait for this instance alone; it is gone, so they must choose again."""
        line = self._by_instance.get(instance) or OrderedDict()
        return [turn for name, turn in line.items() if name in self._bound]

    def check_integrity(self) -> None:
        """Every waiting turn stands in exactly one of: its need's line, or its only instance's."""
        in_needs = [name for line in self._by_need.values() for name in line]
        assert len(in_needs) == len(set(in_needs))
        assert set(in_needs) | self._bound == set(self._turns)
        assert not set(in_needs) & self._bound
        for instance, line in self._by_instance.items():
            assert all(self._preferred[name] == instance for name in line)
        assert sum(len(line) for line in self._by_instance.values()) == len(self._preferred)
