"""What a step would gain if devices that the rollout's tail leaves idle trained meanwhile, as Libra
and Heddle split them.

The rollout is replayed under our rules; a trajectory's tokens may be trained once it has ended. As
trajectories end, the live ones need ever fewer engines: as many as hold their contexts. `at_most`
takes all other devices for training at once, as if packing, switching and small groups were free.
`switched` needs devices for the training state, and pays for moving it whenever the group of
training devices grows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from benchmarks.rollout.simulated.agent_run import AgentFleet, AgentResult, EndedTrajectory
from benchmarks.rollout.simulated.trainer_cost import TrainerCost

STATE_BYTES = 16  # of a parameter: weight, gradient, fp32 copy, two moments
COPY_BYTES_PER_S = 55.3e9  # between a device and pinned host memory (docs/results/gpu.md)


@dataclass(frozen=True, slots=True)
class Group:
    """Devices that train from some moment on."""

    since_s: float
    devices: int


def idle_devices(fleet: AgentFleet, result: AgentResult) -> list[Group]:
    """How many devices the live trajectories leave over, if packed, whenever that changes."""
    live_tokens = sum(end.context_tokens for end in result.ended)
    free: list[Group] = []
    for end in sorted(result.ended, key=lambda end: end.at_s):
        live_tokens -= end.context_tokens
        used = min(ceil(live_tokens / fleet.engine.kv_tokens), fleet.engines)
        devices = (fleet.engines - used) * fleet.engine.devices
        if devices > (free[-1].devices if free else 0):
            free.append(Group(end.at_s, devices))
    return free


def train_s(
    cost: TrainerCost, ended: Sequence[EndedTrajectory], groups: Sequence[Group], *, moves: bool
) -> float:
    """When all is trained, by groups of which the last has all devices; `moves`: each group first
    brings the state to its devices.
    """
    per_device = cost.tokens_per_s / cost.devices
    state_bytes = STATE_BYTES * cost.model.billions * 1e9 if moves else 0.0
    arrivals = sorted(ended, key=lambda end: end.at_s)
    trained, before = 0.0, 0
    for group, following in pairwise(groups):
        rate = per_device * group.devices
        at_s = group.since_s + _move_s(state_bytes, before, group.devices)
        for end in arrivals:
            if at_s < end.at_s <= following.since_s:
                ready = sum(each.context_tokens for each in arrivals if each.at_s <= at_s)
                trained = min(trained + rate * (end.at_s - at_s), max(ready, trained))
                at_s = end.at_s
        before = group.devices
    last = groups[-1]
    left = sum(end.context_tokens for end in ended) - trained
    moved_s = _move_s(state_bytes, before, last.devices)
    return last.since_s + moved_s + left / (per_device * last.devices) + cost.optimizer_s


def _move_s(state_bytes: float, before: int, after: int) -> float:
    """The state goes to the host from the devices that had it, and to those that get it."""
    written_s = state_bytes / before if before else 0.0
    return (written_s + state_bytes / after) / COPY_BYTES_PER_S


def step_figures(fleet: AgentFleet, result: AgentResult) -> dict[str, float]:
    """Seconds of a step, and how many times shorter a split would make it."""
    devices = fleet.engines * fleet.engine.devices
    cost = TrainerCost(fleet.engine.model, fleet.engine.accelerator, devices)
    whole = Group(result.seconds, devices)
    memory = fleet.engine.accelerator.hbm_gb * 1e9 * fleet.engine.memory_share
    least = ceil(STATE_BYTES * cost.model.billions * 1e9 / memory)
    idle = [group for group in idle_devices(fleet, result) if group.since_s < result.seconds]
    able = [group for group in idle if group.devices >= least]
    alone_s = train_s(cost, result.ended, [whole], moves=True)
    free_s = train_s(cost, result.ended, [whole], moves=False)
    return {
        "rollout_s": result.seconds,
        "step_s": alone_s,
        "at_most": free_s / train_s(cost, result.ended, [*idle, whole], moves=False),
        "switched": alone_s / train_s(cost, result.ended, [*able, whole], moves=True),
    }
