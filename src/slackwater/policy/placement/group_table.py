"""Co-execution groups as flat arrays, which compiled code scans for every arrival.

A row is a group. Its members are in order of admission. A group's rollout nodes are bits of a mask.
A member's pinning (`pins`) is the sub-mask of the rollout nodes that it uses; an empty pinning
means that the member rolls out on the group's train nodes.
"""

import numpy as np

from slackwater.policy.columns import MAX_MEMBERS, MAX_ROLLOUT_NODES, WORK_ROWS, Floats, Ints

_FIRST_ROWS = 64


class GroupTable:
    """The arrays grow with the number of groups. Rows of dissolved groups are reused, lowest
    first.
    """

    def __init__(self) -> None:
        rows = _FIRST_ROWS
        self.rows = 0
        self.members: Ints = np.zeros(rows, np.int64)
        self.train_nodes: Ints = np.zeros(rows, np.int64)
        self.node_mask: Ints = np.zeros(rows, np.int64)
        self.train_gb: Floats = np.zeros(rows)
        self.node_gb: Floats = np.zeros((rows, MAX_ROLLOUT_NODES))
        self.work: Floats = np.zeros((rows, WORK_ROWS, MAX_MEMBERS))
        self.cycle_s: Floats = np.zeros(rows)
        self.pins: Ints = np.zeros((rows, MAX_MEMBERS), np.int64)

    _COLUMNS = (
        "members",
        "train_nodes",
        "node_mask",
        "train_gb",
        "node_gb",
        "work",
        "cycle_s",
        "pins",
    )

    @property
    def arrays(self) -> tuple[int, Ints, Ints, Ints, Floats, Floats, Floats, Ints]:
        """The first arguments of the compiled scans."""
        return (
            self.rows,
            self.members,
            self.train_nodes,
            self.node_mask,
            self.train_gb,
            self.node_gb,
            self.work,
            self.pins,
        )

    def take_row(self, train_nodes: int) -> int:
        """A row for a new group without members."""
        empty = np.flatnonzero(self.train_nodes[: self.rows] == 0)
        row = int(empty[0]) if len(empty) else self.rows
        if row == len(self.members):
            for name in self._COLUMNS:
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self.rows = max(self.rows, row + 1)
        self.train_nodes[row] = train_nodes
        return row

    def clear_row(self, row: int) -> None:
        for name in self._COLUMNS:
            getattr(self, name)[row] = 0
        while self.rows and self.train_nodes[self.rows - 1] == 0:
            self.rows -= 1

    def append(self, row: int, work: Floats, pins: int) -> None:
        index = self.members[row]
        assert index < MAX_MEMBERS, f"group {row} is full"
        self.work[row, :, index] = work
        self.pins[row, index] = pins
        self.members[row] += 1

    def drop(self, row: int, index: int) -> None:
        """Take a member out; those behind it move up."""
        last = self.members[row] - 1
        for column in (self.work[row], self.pins[row]):
            column[..., index:last] = column[..., index + 1 : last + 1].copy()
            column[..., last] = 0
        self.members[row] -= 1
