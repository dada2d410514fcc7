"""Execute a merger: jobs of another group move into a group, on its nodes or on newly rented
ones.
"""

from slackwater.model.ids import JobId
from slackwater.model.placement import Strategy
from slackwater.policy.placement.consolidation import Merger, restart_s
from slackwater.policy.placement.cycle_plan import adopt_cycle
from slackwater.policy.placement.groups import GroupChoice, GroupRegistry, bits


def execute_merger(registry: GroupRegistry, merger: Merger, now_s: float) -> list[JobId]:
    """Move the jobs whose nodes change, and adopt the layout's cycle. Return the moved jobs.

    A layout names new nodes by bits that are free in the group. `real` maps each of its bits to the
    bit that the rented node got.
    """
    row = merger.row
    real = {1 << slot: 1 << slot for slot in registry.groups[row].rollout}
    moved = []
    for job, wanted in zip(merger.jobs, merger.layout.pins, strict=True):
        member = registry.members[job]
        if member.row == row and member.pins == wanted:
            continue
        named = [1 << slot for slot in bits(wanted)]
        kept = sum(real[bit] for bit in named if bit in real)
        missing = [bit for bit in named if bit not in real]
        member.budget_s -= restart_s(registry, job, now_s)
        member.moved_s = now_s
        reason = f"sharing {registry.groups[row].group} saves ${merger.gain:.0f}"
        strategy = sharing_strategy(kept, len(missing))
        opened = (
            registry.move(job, GroupChoice(row, kept, len(missing), 0, strategy, reason)).pins
            & ~kept
        )
        real.update(zip(missing, (1 << slot for slot in bits(opened)), strict=True))
        moved.append(job)
    adopt_cycle(registry, row, merger.jobs, merger.layout.cycle)
    return moved


def sharing_strategy(pins: int, new_nodes: int) -> Strategy:
    """How a job joins a group: on its rollout nodes, on new ones, or on its train nodes."""
    if new_nodes:
        return Strategy.SCALE
    return Strategy.PACK if pins else Strategy.COLOCATE
