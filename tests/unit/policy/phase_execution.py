"""Plain event-by-event execution of groups, written without the policies' own kernels, to judge
them by.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import GroupPlan, Phase

Length = Callable[[JobId, Phase, float], float]


def worst(job: JobId, phase: Phase, length_s: float) -> float:
    """Every phase at its worst."""
    del job, phase
    return length_s


def run_plan(
    plan: GroupPlan, sync_s: dict[JobId, float], cycles: int, length: Length = worst
) -> dict[JobId, list[float]]:
    """When each job's iterations end, if nodes keep the plan's order and phases start as early as
    they can.
    """
    turns = sorted(
        (slot.start_s + cycle * plan.period_s, number, cycle)
        for cycle in range(cycles)
        for number, slot in enumerate(plan.slots)
    )
    node_free: dict[NodeId, float] = defaultdict(float)
    job_ready: dict[JobId, float] = defaultdict(float)
    ends: dict[JobId, list[float]] = defaultdict(list)
    for _, number, _ in turns:
        slot = plan.slots[number]
        begin = max([job_ready[slot.job], *(node_free[node] for node in slot.nodes)])
        end = begin + length(slot.job, slot.phase, slot.length_s)
        for node in slot.nodes:
            node_free[node] = end
        job_ready[slot.job] = end
        if slot.phase is Phase.TRAIN:
            job_ready[slot.job] += sync_s.get(slot.job, 0.0)
            ends[slot.job].append(job_ready[slot.job])
    return ends


def run_in_turn(
    roll_s: Sequence[float],
    train_s: Sequence[float],
    sync_s: Sequence[float],
    pins: Sequence[int],
    cycles: int,
    share: Callable[[], float] = lambda: 1.0,
) -> list[list[float]]:
    """When each job's iterations end under round robin: one rollout and one train each, in order,
    on every node.
    """
    train_free = 0.0
    node_free: dict[int, float] = defaultdict(float)
    ready = [0.0] * len(roll_s)
    ends: list[list[float]] = [[] for _ in roll_s]
    pinned = [[node for node in range(64) if pin >> node & 1] for pin in pins]
    for _ in range(cycles):
        rolled = []
        for job, nodes in enumerate(pinned):
            begin = max([ready[job], *(node_free[node] for node in nodes)])
            end = begin + roll_s[job] * share()
            for node in nodes:
                node_free[node] = end
            rolled.append(end)
        for job, end in enumerate(rolled):
            train_free = max(end, train_free) + train_s[job] * share()
            ready[job] = train_free + sync_s[job]
            ends[job].append(ready[job])
    return ends
