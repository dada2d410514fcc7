"""What a phase's tensors do between phases: they sleep in host memory, under this process's own state manager, and their device memory is free.

Modules, optimizers and tensors keep their identity; only where their data is changes. Gradients are not kept: between phases there are none.
"""

import atexit
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slackwater.model.errors import ConfigError
from slackwater.model.residency import Part, StateBudgets, StateKey, Tier
from slackwater.phases.job import Job
from slackwater.state.device import DeviceTier
from slackwater.state.manager import StateManager
from slackwater.state.port import About

_HUGE = 1 << 62
_sleepers: dict[tuple[int, ...], "Sleeper"] = {}
_lock = threading.Lock()


def tensors_of(things: Iterable[Any]) -> Iterator[Tensor]:
    """Every tensor of modules, optimizers, lists and mappings of them, each once."""
    seen: set[int] = set()
    for thing in things:
        for tensor in _walk(thing):
            if id(tensor) not in seen and tensor.numel():
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
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from _walk(value)
    elif hasattr(thing, "optimizer"):  # a wrapper of an optimizer, as accelerate has one
        yield from _walk(thing.optimizer)
    elif thing is not None and not isinstance(thing, (int, float, str, bool)):
        raise ConfigError.of(
            "phase state",
            type(thing).__name__,
            "must be a module, an optimizer, a tensor or a list of them",
        )


class Sleeper:
    """The tensors of some objects on one device; `wake` and `sleep` move them. What is added later (moments) joins at the next sleep."""

    def __init__(self, name: str, things: Sequence[Any]) -> None:
        self._name = name
        self._things = things
        self._tensors: list[Tensor] = []
        self._shapes: list[torch.Size] = []
        self._asleep = False
        self._tier: DeviceTier | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="slackwater-phase-")
        self._manager: StateManager | None = None

    def wake(self) -> None:
        """All tensors are on their device."""
        if self._asleep and self._manager is not None:
            self._manager.ensure(self._name, Tier.DEVICE, lease=True)
            self._asleep = False

    def sleep(self) -> None:
        """All tensors are in host memory, and their device memory may be another's."""
        found = list(tensors_of(self._things))
        if not found:
            return
        if {id(t) for t in found} != {id(t) for t in self._tensors}:
            self._manage(found)
        assert self._manager is not None
        self._manager.release(self._name)
        self._manager.evict(self._name, Tier.HOST)
        self._asleep = True

    def bind(self, tensors: Mapping[StateKey, Tensor], about: About) -> None:
        """For the manager: the tensors' data is here. The first time it is brought along, later it is there already."""
        fresh = "shapes" not in about
        for tensor, place, shape in zip(self._tensors, tensors.values(), self._shapes, strict=True):
            view = place.view(shape)
            if fresh:
                view.copy_(tensor.detach())
            tensor.data = view

    def unbind(self) -> About:
        for tensor in self._tensors:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return {"shapes": [list(shape) for shape in self._shapes]}

    def _manage(self, tensors: list[Tensor]) -> None:
        """A new manager for what there is now; the old one's pages go."""
        old = (self._tier, self._manager)
        for tensor in tensors:
            tensor.data = tensor.data.clone()  # off the old manager's memory
        devices = {str(tensor.device) for tensor in tensors}
        if len(devices) > 1:
            raise ConfigError.of("phase state", sorted(devices), "must be on one device")
        parts = [
            Part(
                StateKey(self._name, "process", str(number), "tensor", 0, tensor.numel()),
                str(tensor.dtype).removeprefix("torch."),
                tensor.element_size(),
                shape=tuple(tensor.shape),
            )
            for number, tensor in enumerate(tensors)
        ]
        ordered = sorted(range(len(parts)), key=lambda n: -parts[n].element_bytes)
        self._tensors = [tensors[n] for n in ordered]
        self._shapes = [tensors[n].shape for n in ordered]
        self._manager = StateManager(StateBudgets(_HUGE, _HUGE), Path(self._folder.name))
        self._tier = DeviceTier(self._manager, "process", _HUGE, devices.pop())
        self._manager.attach("process", self._tier)
        self._tier.add(self._name, [parts[n] for n in ordered], self)
        self._manager.ensure(self._name, Tier.DEVICE, lease=True)
        _close(*old)

    def close(self) -> None:
        if self._asleep:
            self.wake()
        for tensor in self._tensors:
            tensor.data = tensor.data.clone()
        _close(self._tier, self._manager)
        self._tier = self._manager = None
        self._tensors = []
        self._folder.cleanup()


def _close(tier: DeviceTier | None, manager: StateManager | None) -> None:
    if tier is not None:
        tier.close()
    if manager is not None:
        manager.close()


def sleeper_of(job: Job, things: Sequence[Any]) -> Sleeper:
    """The one sleeper of these objects in this process."""
    key = tuple(id(thing) for thing in things)
    with _lock:
        if key not in _sleepers:
            _sleepers[key] = made = Sleeper(job.name, things)
            atexit.register(made.close)
        return _sleepers[key]
