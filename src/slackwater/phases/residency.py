"""Keeps a phase's tensors in host memory between phases, so that device memory is free.

The process has its own state manager. Modules, optimizers and tensors keep their identity; only
their data moves. Gradients are dropped. A tensor is in one group; overlapping states split groups,
so that a phase loads what it needs and little more.
"""

import atexit
import itertools
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slackwater.model.errors import ConfigError
from slackwater.model.residency import StateBudgets, StateKey, StoredPart, Tier
from slackwater.state.device import DeviceTier
from slackwater.state.manager import StateManager
from slackwater.state.port import About

_HUGE = 1 << 62


def tensors_of(things: Iterable[Any]) -> Iterator[Tensor]:
    """Every tensor of modules, optimizers and containers of them, each once."""
    seen: set[int] = set()
    for thing in things:
        for tensor in _walk(thing):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def _walk(thing: Any) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, torch.nn.Module):
        yield from thing.parameters()
        yield from thing.buffers()
    elif isinstance(thing, torch.optim.Optimizer):
        yield from _walk(dict(thing.state))
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from _walk(value)
    elif hasattr(thing, "optimizer"):  # a wrapper of an optimizer, as accelerate has one
        yield from _walk(thing.optimizer)
    elif isinstance(thing, Iterable) and not isinstance(thing, (str, bytes)):
        for value in thing:
            yield from _walk(value)
    elif thing is not None and not isinstance(thing, (int, float, str, bytes, bool)):
        raise ConfigError.of(
            "phase state",
            type(thing).__name__,
            "must be a module, an optimizer, a tensor or a list of them",
        )


class TensorGroup:
    """Tensors of one device that wake and sleep together."""

    def __init__(self, name: str, tensors: Sequence[Tensor]) -> None:
        self.name = name
        ordered = sorted(tensors, key=lambda tensor: -tensor.element_size())
        self._members = [weakref.ref(tensor) for tensor in ordered]
        self._shapes = [tensor.shape for tensor in ordered]
        self._places: list[Tensor] = []
        self.asleep = False
        self.parts = [
            StoredPart(
                StateKey(name, "process", str(number), "tensor", 0, tensor.numel()),
                str(tensor.dtype).removeprefix("torch."),
                tensor.element_size(),
            )
            for number, tensor in enumerate(ordered)
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """Those that are still in use by the program."""
        return [tensor for member in self._members if (tensor := member()) is not None]

    @property
    def is_whole(self) -> bool:
        """Whether every tensor exists and, if awake, is where it was put."""
        members = [member() for member in self._members]
        if self.asleep:
            return all(tensor is not None for tensor in members)
        return all(
            tensor is not None and tensor.data_ptr() == place.data_ptr() and tensor.shape == shape
            for tensor, place, shape in zip(members, self._places, self._shapes, strict=True)
        )

    def bind(self, tensors: Mapping[StateKey, Tensor], about: About) -> None:
        """Point the tensors at this data, copying it the first time."""
        fresh = "shapes" not in about
        self._places = [
            place.view(shape) for place, shape in zip(tensors.values(), self._shapes, strict=True)
        ]
        for member, place in zip(self._members, self._places, strict=True):
            tensor = member()
            if tensor is not None:
                if fresh:
                    place.copy_(tensor.detach())
                tensor.data = place

    def unbind(self) -> About:
        self._places = []
        for tensor in self.tensors:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return {"shapes": [list(shape) for shape in self._shapes]}

    def let_go(self) -> None:
        """Give awake tensors memory of their own."""
        for tensor in self.tensors:
            tensor.data = tensor.data.clone()
        self._members = []
        self._places = []


class PhaseResidency:
    """The groups of this process."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="slackwater-phase-")
        self._manager = StateManager(StateBudgets(_HUGE, _HUGE), Path(self._folder.name))
        self._tiers: dict[str, DeviceTier] = {}
        self._groups: dict[str, tuple[TensorGroup, DeviceTier]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()

    def wake(self, things: Iterable[Any]) -> None:
        """All their tensors are on their devices."""
        wanted = {id(tensor) for tensor in tensors_of(things)}
        with self._lock:
            for group, _ in self._groups.values():
                if group.asleep and any(id(tensor) in wanted for tensor in group.tensors):
                    self._wake(group)

    def sleep(self, things: Iterable[Any]) -> None:
        """Move all tensors to host memory and free device memory."""
        with self._lock:
            wanted = {id(tensor): tensor for tensor in tensors_of(things)}
            loose = [t for t in self._regroup(wanted) if t.numel()]
            for device in {str(tensor.device) for tensor in loose}:
                inside = [t for t in loose if str(t.device) == device]
                self._add([t for t in inside if id(t) in wanted], device)
                self._add([t for t in inside if id(t) not in wanted], device)
            for group, _ in self._groups.values():
                if not group.asleep:
                    self._manager.release(group.name)
                    self._manager.evict(group.name, Tier.HOST)
                    group.asleep = True

    def _regroup(self, wanted: Mapping[int, Tensor]) -> list[Tensor]:
        """Tensors that are in no group: new ones, and those of groups that are not as they were."""
        found = dict(wanted)
        for group, tier in list(self._groups.values()):
            tensors = group.tensors
            inside = [id(tensor) in wanted for tensor in tensors]
            split = any(inside) and not all(inside)
            changed = (any(inside) or not group.asleep) and not group.is_whole
            if not tensors or split or changed:
                if group.asleep and tensors:
                    self._wake(group)
                group.let_go()
                del self._groups[group.name]
                tier.forget(group.name)
                found |= {id(tensor): tensor for tensor in tensors}
        kept = {id(tensor) for group, _ in self._groups.values() for tensor in group.tensors}
        return [tensor for number, tensor in found.items() if number not in kept]

    def _add(self, tensors: Sequence[Tensor], device: str) -> None:
        if not tensors:
            return
        if device not in self._tiers:
            self._tiers[device] = DeviceTier(self._manager, device, _HUGE, device)
            self._manager.attach(device, self._tiers[device])
        tier = self._tiers[device]
        group = TensorGroup(f"group-{next(self._numbers)}", tensors)
        tier.add(group.name, group.parts, group)
        self._groups[group.name] = (group, tier)
        self._wake(group)

    def _wake(self, group: TensorGroup) -> None:
        self._manager.ensure(group.name, Tier.DEVICE, lease=True)
        group.asleep = False

    def close(self) -> None:
        """Wake every tensor in memory of its own."""
        with self._lock:
            for group, _ in self._groups.values():
                if group.asleep:
                    self._wake(group)
                group.let_go()
            self._groups.clear()
            for tier in self._tiers.values():
                tier.close()
            self._manager.close()
            self._folder.cleanup()


_residency: PhaseResidency | None = None
_lock = threading.Lock()


def residency() -> PhaseResidency:
    """The process-wide instance."""
    global _residency
    with _lock:
        if _residency is None:
            _residency = PhaseResidency()
            atexit.register(_residency.close)
        return _residency
