"""Baselines that share nodes and ignore SLOs: a random group, and the most idle group (WEAVE
6.5).
"""

import numpy as np

from slackwater.model.job import JobSpec
from slackwater.model.placement import Strategy
from slackwater.policy.columns import MAX_MEMBERS, ROLL_S, TRAIN_S
from slackwater.policy.ordering.round_robin_cycle import load_s, longest_solo_s
from slackwater.policy.placement.fleet import FleetView
from slackwater.policy.placement.grouped import GroupedPlacement
from slackwater.policy.placement.groups import GroupChoice, bits, choose_isolated


class _NaivePlacement(GroupedPlacement):
    def _rows_with_memory(self, job: JobSpec) -> list[int]:
        """Rows of the groups with memory for the job on their train nodes and on enough of their
        rollout nodes.
        """
        table, fleet, profile = self.registry.table, self.fleet, job.profile
        rows = []
        for row, group in self.registry.groups.items():
            room_gb = fleet.train.node_type.host_memory_gb - table.train_gb[row]
            fits = profile.train_state_gb <= room_gb and len(group.jobs) < self.max_group_size
            if fits and len(self._roomy_nodes(row, job)) >= profile.rollout_nodes:
                rows.append(row)
        return sorted(rows)

    def _roomy_nodes(self, row: int, job: JobSpec) -> list[int]:
        used_gb = self.registry.table.node_gb[row]
        memory_gb = self.fleet.rollout.node_type.host_memory_gb
        nodes = bits(int(self.registry.table.node_mask[row]))
        return [node for node in nodes if used_gb[node] + job.profile.rollout_state_gb <= memory_gb]

    def _join(self, row: int, nodes: list[int], reason: str) -> GroupChoice:
        return GroupChoice(row, sum(1 << node for node in nodes), 0, 0, Strategy.PACK, reason)


class RandomPlacement(_NaivePlacement):
    """A random group with enough memory, or a new one, and random nodes in it. Seeded."""

    name = "random"

    def __init__(self, fleet: FleetView, max_group_size: int = MAX_MEMBERS, seed: int = 0) -> None:
        super().__init__(fleet, max_group_size)
        self._draws = np.random.default_rng(seed)

    def _choose(self, job: JobSpec, now_s: float) -> GroupChoice | None:
        del now_s
        rows = self._rows_with_memory(job)
        alone = choose_isolated(self.registry, job.profile, "drawn: a new group")
        drawn = int(self._draws.integers(len(rows) + (alone is not None or not rows)))
        if drawn == len(rows):
            return alone
        nodes = self._roomy_nodes(rows[drawn], job)
        picked = self._draws.choice(nodes, job.profile.rollout_nodes, replace=False)
        return self._join(rows[drawn], [int(node) for node in picked], "drawn")


class MostIdlePlacement(_NaivePlacement):
    """The group with the largest share of idle time, and its most idle nodes; a new group only if
    no group has enough memory.
    """

    name = "most_idle"

    def _choose(self, job: JobSpec, now_s: float) -> GroupChoice | None:
        del now_s
        rows = self._rows_with_memory(job)
        if not rows:
            return choose_isolated(self.registry, job.profile, "no group has memory for it")
        row = max(rows, key=lambda row: (self._idle_share(row), -row))
        nodes = self._roomy_nodes(row, job)
        nodes.sort(key=lambda node: (self._rollout_load_s(row, node), node))
        return self._join(row, nodes[: job.profile.rollout_nodes], "the most idle group")

    def _idle_share(self, row: int) -> float:
        """The share of the group's node time that is idle in one meta-iteration."""
        table, group = self.registry.table, self.registry.groups[row]
        work, pins, count = table.work[row], table.pins[row], len(group.jobs)
        cycle_s = max(load_s(work, pins, count), longest_solo_s(work, count))
        busy_s = float(work[TRAIN_S, :count].sum()) * len(group.train)
        for index in range(count):
            busy_s += work[ROLL_S, index] * len(bits(int(pins[index])))
        return 1 - busy_s / (cycle_s * (len(group.train) + len(group.rollout)))

    def _rollout_load_s(self, row: int, node: int) -> float:
        table = self.registry.table
        count = int(table.members[row])
        on_node = (table.pins[row, :count] >> node) & 1
        return float((table.work[row, ROLL_S, :count] * on_node).sum())
