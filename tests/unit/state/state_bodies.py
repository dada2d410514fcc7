"""Deployments for the tests: a body that holds its tensors, and checks what it gets back."""

import time
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slackwater.control.state.events import NextHinted
from slackwater.model.residency import PartRole, StateKey, StoredPart, Tier
from slackwater.state.manager import StateManager
from slackwater.state.port import About


def part(
    deployment: str,
    parameter: str,
    elements: int,
    kind: str = "weight",
    role: PartRole = PartRole.KEPT,
    model: str = "m",
    start: int = 0,
) -> StoredPart:
    key = StateKey(deployment, model, parameter, kind, start, start + elements)
    return StoredPart(key, "float32", 4, role)


class PlainBody:
    """Remembers the sum of every stored tensor when it lets go, and finds it again when it is
    bound.
    """

    def __init__(self, roles: Mapping[StateKey, PartRole]) -> None:
        self.roles = dict(roles)
        self.tensors: dict[StateKey, Tensor] = {}
        self.sums: dict[StateKey, int] = {}
        self.steps = 0
        self.wrong: list[str] = []

    @classmethod
    def of(cls, parts: list[StoredPart]) -> "PlainBody":
        return cls({each.key: each.role for each in parts})

    def bind(self, tensors: Mapping[StateKey, Tensor], about: About) -> None:
        self.tensors = dict(tensors)
        self.steps = int(about.get("steps", 0))
        for key, tensor in tensors.items():
            if self.roles[key] is PartRole.FROZEN and not about:
                tensor.copy_(frozen_values(key, len(tensor)))
        for key, tensor in tensors.items():
            if self.roles[key] is PartRole.SCRATCH:
                if tensor.any():
                    self.wrong.append(f"{key} is not zero")
            elif key in self.sums and summed(tensor) != self.sums[key]:
                self.wrong.append(str(key))

    def unbind(self) -> About:
        self.sums = {
            key: summed(tensor)
            for key, tensor in self.tensors.items()
            if self.roles[key] is not PartRole.SCRATCH
        }
        self.tensors = {}
        return {"steps": self.steps}

    def change(self, generator: torch.Generator) -> None:
        """Compute something: all but the frozen parts differ afterwards."""
        self.steps += 1
        for key, tensor in self.tensors.items():
            if self.roles[key] is not PartRole.FROZEN:
                tensor.copy_(torch.rand(tensor.shape, generator=generator))


def frozen_values(key: StateKey, elements: int) -> Tensor:
    """What a frozen tensor of that name has in every deployment."""
    seed = zlib.crc32(str(key).encode())
    return torch.rand(elements, generator=torch.Generator().manual_seed(seed))


def summed(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data)


def tiers_of(manager: StateManager) -> dict[str, Tier]:
    """The tier of every deployment's newest state."""
    with manager.lock:
        found = {name: manager.controller.tier(name) for name in manager.catalogue.entries}
        return {name: tier for name, tier in found.items() if tier is not None}


def hint_next(manager: StateManager, deployments: Sequence[str]) -> None:
    """Tell the manager which deployments run next, in order."""
    manager.tell(NextHinted(time.monotonic(), tuple(deployments)))
