"""The device tier's memory: reused blocks, so that a switch does not wait for an allocator.

The controller decides what is there and keeps the budget; unused blocks are freed before they would
exceed it.
"""

import torch
from torch import Tensor

from slackwater.policy.state.layout import aligned

_ROUND = 2 << 20
_WASTE = 1.25


class HostBlockPool:
    """Keeps live and resting blocks within the budget as far as the live ones allow."""

    def __init__(self, budget: int, device: str = "cpu") -> None:
        self._budget = budget
        self._device = device
        self._resting: list[Tensor] = []
        self._live = 0

    def take(self, size: int) -> Tensor:
        """A block of at least that many bytes; its content is whatever was there."""
        room = aligned(max(size, 1), _ROUND)
        fitting = [b for b in self._resting if room <= b.nbytes <= max(_WASTE * room, room)]
        if fitting:
            block = min(fitting, key=lambda b: b.nbytes)
            self._resting = [b for b in self._resting if b is not block]
        else:
            while self._resting and self._live + self.resting_bytes + room > self._budget:
                self._resting.pop(0)
            block = torch.empty(room, dtype=torch.uint8, device=self._device)
        self._live += block.nbytes
        return block

    def give(self, block: Tensor) -> None:
        """Nobody uses the block any more."""
        self._live -= block.nbytes
        self._resting.append(block)
        while self._resting and self._live + self.resting_bytes > self._budget:
            self._resting.pop(0)

    @property
    def resting_bytes(self) -> int:
        return sum(block.nbytes for block in self._resting)
