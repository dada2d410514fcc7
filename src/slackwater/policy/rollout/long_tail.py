"""Which trajectories run on own instances, and which on lent or preemptible ones, so that the
longest trajectory ends soon.

A training step waits for its longest trajectory, which is the faster the fewer turns run beside it.
So a trajectory that would end in time on a lent instance runs there, although an own one has room,
and long trajectories take the places of short ones that have just begun on an own instance. Lengths
are predicted from earlier trajectories of the same prompt (`start_order`). The rule leaves
trajectories of unknown prompts, and fleets of own instances alone, as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from slackwater.policy.rollout.instance_load import InstanceLoad
from slackwater.policy.rollout.step_time import StepTime

# The share of the longest trajectory's time in which others must end elsewhere: forecasts are
# rough, and a burst of the service may slow down a lent instance.
_IN_TIME = 0.5
# A trajectory that ends sooner is not worth prefilling its context on another instance.
_WORTH_MOVING_S = 10.0
_MUCH_LONGER = 1.5
# A turn of so few tokens is prefilled again in a fraction of a second.
SHORT_CONTEXT_TOKENS = 4000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """How long a trajectory will take on an own instance, and the longest one of its job."""

    own_s: float
    longest_s: float
    step_time: StepTime

    def find_spare(
        self,
        context_tokens: int,
        home: InstanceLoad | None,
        eligible: Sequence[InstanceLoad],
        can_take: Callable[[InstanceLoad], bool],
    ) -> InstanceLoad | None:
        """The lent instance on which the trajectory should run, if there is one. `eligible` lists
        own instances first.
        """
        if not eligible or not eligible[0].owned or eligible[-1].owned:
            return None
        own = [load for load in eligible if load.owned]
        compared = [home] if home is not None and home.owned else own
        own_step_s = min(self._step_s(load, context_tokens) for load in compared)
        latest_s = _IN_TIME * self.longest_s * own_step_s / self.own_s
        in_time = [
            load
            for load in eligible[len(own) :]
            if self._step_s(load, context_tokens) <= latest_s and can_take(load)
        ]
        if home is None:
            least = min(load.in_flight for load in own)
            in_time = [load for load in in_time if load.in_flight <= least]
        elif not home.owned:
            return home if home in in_time else None
        elif self.own_s < _WORTH_MOVING_S or home.in_flight < 2:
            return None
        return min(in_time, key=lambda load: self._step_s(load, context_tokens), default=None)

    def _step_s(self, load: InstanceLoad, context_tokens: int) -> float:
        """A step of the instance with this trajectory's turn beside its others."""
        context = load.kv_load_tokens + context_tokens
        return load.slowness * self.step_time.step_s(load.in_flight + 1, context)


def pair_exchanges(
    long: Sequence[tuple[float, T]], short: Sequence[tuple[float, T]]
) -> list[tuple[T, T]]:
    """Pairs of a trajectory that waits or runs on a lent instance and a much shorter one on an own
    instance, the most unequal first; both are given with the time that they will take.
    """
    longest = sorted(long, key=lambda each: -each[0])
    shortest = sorted(short, key=lambda each: each[0])
    return [
        (one, other)
        for (one_s, one), (other_s, other) in zip(longest, shortest, strict=False)
        if one_s >= _MUCH_LONGER * other_s
    ]
