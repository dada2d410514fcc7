"""A trainer's state in a node's state manager: parts by key, bound to device memory and unbound.

The manager stores the fp32 masters, the moments and a gradient that is not empty. The weights in
the net's own dtype are recomputed from the masters. A frozen base is dropped, and loaded again from
the one copy that all its adapters share.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slackwater.model.residency import PartRole, StateKey, StoredPart
from slackwater.training.trainer import Trainer

_SCRATCH = ("live", "live_gradient")


class ManagedState:
    """Binds a trainer's vectors and frozen base; `seq` is the last operation in its state."""

    def __init__(self, trainer: Trainer, job: str, model: str, seq: int = -1) -> None:
        self.trainer = trainer
        self.seq = seq
        self._job, self._model = job, model
        self._first = True
        self._kinds = list(trainer.flat.vectors())
        self._frozen_shapes = {name: t.shape for name, t in trainer.frozen().items()}

    def parts(self) -> list[StoredPart]:
        """The parts, in the order of the vectors, so that each kind is one run of memory."""
        flat = self.trainer.flat
        found = [
            StoredPart(
                self._key(kind, name),
                _dtype(vector),
                vector.element_size(),
                PartRole.SCRATCH if kind in _SCRATCH else PartRole.KEPT,
            )
            for kind, vector in flat.vectors().items()
            for name in flat.slices
        ]
        return found + [
            StoredPart(self._frozen_key(name), _dtype(t), t.element_size(), PartRole.FROZEN)
            for name, t in self.trainer.frozen().items()
        ]

    def bind(self, tensors: Mapping[StateKey, Tensor], about: Mapping[str, Any]) -> None:
        """Bind device memory. The first time without `about`, copy the trainer's numbers into it;
        otherwise it holds them already.
        """
        flat, frozen = self.trainer.flat, self.trainer.frozen()
        places = {
            kind: _join_views([tensors[self._key(kind, name)] for name in flat.slices])
            for kind in self._kinds
        }
        with torch.no_grad():
            if self._first and not about:
                for kind, vector in flat.vectors().items():
                    places[kind].copy_(vector)
                for name, tensor in frozen.items():
                    tensors[self._frozen_key(name)].copy_(tensor.detach().reshape(-1))
            flat.rebind(places)
            if about and self._first:  # the state of an earlier trainer
                self.trainer.restore_counters(about["meta"])
                self.seq = int(about["seq"])
            self._first = False
            for name, tensor in frozen.items():
                place = tensors[self._frozen_key(name)]
                tensor.data = place.view(self._frozen_shapes[name])

    def unbind(self) -> Mapping[str, Any]:
        meta = self.trainer.meta
        self.trainer.flat.unbind()
        for tensor in self.trainer.frozen().values():
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        empty = [] if meta.accumulated_passes else ["gradient"]
        return {"meta": meta.to_json(), "empty_kinds": empty, "seq": self.seq}

    def _key(self, kind: str, name: str) -> StateKey:
        part = self.trainer.flat.slices[name]
        return StateKey(self._job, self._model, name, kind, 0, part.stop - part.start)

    def _frozen_key(self, name: str) -> StateKey:
        size = self._frozen_shapes[name].numel()
        base = f"base-{self.trainer.meta.base_sum}-{self.trainer.meta.dtype}"
        return StateKey("", base, name, "frozen", 0, size)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _join_views(run: list[Tensor]) -> Tensor:
    """One vector over views that are adjacent in memory."""
    size = sum(len(each) for each in run)
    return run[0].as_strided((size,), (1,))
