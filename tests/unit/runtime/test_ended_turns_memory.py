"""What ended turns leave in memory does not grow with their number."""

import tracemalloc
from array import array
from collections.abc import Callable

from slackwater.control.rollout.homes import CacheHomes
from slackwater.control.rollout.instances import InstanceRecord, Instances
from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.model.ids import InstanceId, JobId, TrajectoryId, TurnId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec
from slackwater.runtime.executors.trajectory_index import TrajectoryIndex

_FIRST, _MORE = 26_000, 4_000  # by then tables have their size
_TURNS_PER_S = 200
_LEASE_S = 5.0


def bytes_each(end_turn: Callable[[int], None]) -> float:
    """What each of `_MORE` turns leaves behind after `_FIRST`."""
    tracemalloc.start()
    try:
        for number in range(_FIRST):
            end_turn(number)
        before, _ = tracemalloc.get_traced_memory()
        for number in range(_FIRST, _FIRST + _MORE):
            end_turn(number)
        return (tracemalloc.get_traced_memory()[0] - before) / _MORE
    finally:
        tracemalloc.stop()


def test_trajectories_that_do_not_return_are_forgotten_when_there_are_many() -> None:
    instances = Instances()
    spec = InstanceSpec(InstanceId("a"), InstanceKind.DEDICATED, 64, 1 << 16, 1 << 20)
    instances.add(InstanceRecord(spec, 0.0))
    homes = CacheHomes(instances, _LEASE_S, 100_000)
    prompts = [array("I", [number]) for number in range(64)]

    def end_turn(number: int) -> None:
        now_s, name = number / _TURNS_PER_S, f"turn-{number}"
        prompt, sampling = prompts[number % 64], Sampling(max_tokens=8)
        turn = LiveTurn(
            TurnSpec(TurnId(name), TrajectoryId(name), JobId("job"), prompt, sampling, "v1"),
            deadline_s=now_s + 60.0,
            sequence=number,
        )
        homes.record_open(turn, now_s)
        turn.instance = spec.instance
        homes.record_dispatch(turn, now_s)
        homes.record_close(turn, now_s)
        if number % _TURNS_PER_S == 0:
            homes.expire(now_s)

    assert bytes_each(end_turn) < 50
    assert _LEASE_S * _TURNS_PER_S < len(homes) < _FIRST  # those of the lease are remembered


def test_the_index_of_conversations_is_bounded() -> None:
    index, prompt = TrajectoryIndex(), array("I", range(8))

    def end_turn(number: int) -> None:
        sampled = array("I", [number] * 8)
        _, prompt_end = index.find_continued("v1", prompt)
        index.record_turn(prompt_end, sampled, TrajectoryId(f"turn-{number}"), 0.0)

    assert bytes_each(end_turn) < 50
    found, _ = index.find_continued("v1", prompt + array("I", [_FIRST] * 8))
    assert found == f"turn-{_FIRST}"
