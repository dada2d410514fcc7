"""The trainable parameters of a net as one flat vector, with its gradient and its two Adam moments.

The net's parameters become views of the vector, so that clipping, stepping and snapshots are a few
operations on long vectors. Below fp32 the vector is the fp32 master copy. A frozen base is
identified by a sum over its weights as bfloat16, in integers modulo 2^64: the same for fp32 and
bf16, on every device.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from slackwater.model.adam import Adam
from slackwater.model.errors import ConfigError

_CHUNK = 1 << 22  # 64-bit words at a time
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that a change of any single word changes the sum
_MODULUS = 1 << 64


def base_sum(tensors: Mapping[str, Tensor]) -> int:
    """A 64-bit number that depends on every weight, its position, and the order of the tensors."""
    return combine_sums(tensor_sum(tensor) for tensor in tensors.values())


@torch.no_grad()
def tensor_sum(tensor: Tensor) -> int:
    """One tensor's part of `base_sum`."""
    flat = tensor.detach().reshape(-1).to(torch.bfloat16)
    return flat.numel() + _words_sum(flat)


def combine_sums(sums: Iterable[int]) -> int:
    """`base_sum` from the sums of its tensors, in the net's order."""
    total = 0
    for each in sums:
        total = (total * 0x100000001B3 + each) % _MODULUS
    return total


def _words_sum(flat: Tensor) -> int:
    odd = -flat.numel() % 4
    words = torch.nn.functional.pad(flat, (0, odd)).view(torch.int64)
    weights = torch.arange(min(_CHUNK, len(words)), device=flat.device).mul_(2).add_(1).mul_(_STEP)
    total = 0
    for chunk in torch.split(words, _CHUNK):
        part = int((chunk * weights[: len(chunk)]).sum())
        total = (total * 0x100000001B3 + part) % _MODULUS
    return total


class FlatParameters:
    """Master weights, gradient and moments; `slices` are the parameters' places in each vector."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)
        first = next(iter(self._parameters.values()))
        size = sum(parameter.numel() for parameter in self._parameters.values())
        self._live = torch.empty(size, dtype=first.dtype, device=first.device)
        self._live_gradient = torch.zeros_like(self._live)
        self.slices: dict[str, slice] = {}
        self._shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        start = 0
        for name, parameter in self._parameters.items():
            part = slice(start, start + parameter.numel())
            self.slices[name] = part
            self._live[part] = parameter.detach().reshape(-1)
            parameter.data = self._live[part].view_as(parameter)
            parameter.grad = self._live_gradient[part].view_as(parameter)
            start = part.stop
        fp32 = first.dtype == torch.float32
        self.master = self._live if fp32 else self._live.float()
        self.gradient = self._live_gradient if fp32 else torch.zeros_like(self.master)
        self.moment1 = torch.zeros_like(self.master)
        self.moment2 = torch.zeros_like(self.master)

    def vectors(self) -> dict[str, Tensor]:
        """Every vector by its kind; below fp32 also those in the net's dtype."""
        found = {"weight": self.master, "moment1": self.moment1, "moment2": self.moment2}
        found["gradient"] = self.gradient
        if self.master is not self._live:
            found |= {"live": self._live, "live_gradient": self._live_gradient}
        return found

    def rebind(self, vectors: Mapping[str, Tensor]) -> None:
        """Use other memory that holds the same numbers; the net's parameters become views of it."""
        fp32 = self.master is self._live
        self.master, self.gradient = vectors["weight"], vectors["gradient"]
        self.moment1, self.moment2 = vectors["moment1"], vectors["moment2"]
        self._live = self.master if fp32 else vectors["live"]
        self._live_gradient = self.gradient if fp32 else vectors["live_gradient"]
        self._refresh()
        for name, parameter in self._parameters.items():
            part, shape = self.slices[name], self._shapes[name]
            parameter.data = self._live[part].view(shape)
            parameter.grad = self._live_gradient[part].view(shape)

    def unbind(self) -> None:
        """Release all memory until `rebind`."""
        for parameter in self._parameters.values():
            parameter.grad = None
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        fp32 = self.master is self._live
        nothing = torch.empty(0, device=self.master.device)
        self.master = self.gradient = self.moment1 = self.moment2 = nothing
        self._live = nothing if fp32 else nothing.to(self._live.dtype)
        self._live_gradient = self._live

    def collect(self) -> None:
        """Add what backward left in the net's dtype to the fp32 gradient."""
        if self.gradient is not self._live_gradient:
            self.gradient += self._live_gradient
            self._live_gradient.zero_()

    def reduce_over_ranks(self) -> None:
        """Complete a pass's gradient when several ranks share the pass."""

    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.gradient.sum()))

    def set_gradient(self, value: Tensor | None) -> None:
        """Replace the accumulated gradient by `value`, or by zeros."""
        self._live_gradient.zero_()
        if value is None:
            self.gradient.zero_()
        else:
            self.gradient.copy_(value)

    def step(self, adam: Adam, number: int) -> float:
        """AdamW update `number`, from 1, with the gradient, clipped; the norm before clipping."""
        norm = self._norm()
        if adam.grad_clip_norm and norm > adam.grad_clip_norm:
            self.gradient *= adam.grad_clip_norm / norm
        self.moment1.lerp_(self.gradient, 1 - adam.beta1)
        self.moment2.mul_(adam.beta2).addcmul_(self.gradient, self.gradient, value=1 - adam.beta2)
        correction1 = 1 - adam.beta1**number
        correction2 = 1 - adam.beta2**number
        scale = self.moment2.sqrt().div_(correction2**0.5).add_(adam.eps)
        if adam.weight_decay:
            self.master *= 1 - adam.learning_rate * adam.weight_decay
        self.master.addcdiv_(self.moment1, scale, value=-adam.learning_rate / correction1)
        self._refresh()
        return norm

    def _norm(self) -> float:
        return float(torch.linalg.vector_norm(self.gradient))

    def views_by_name(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector of this layout by parameter name, as views."""
        return {name: vector[part].view(self._shapes[name]) for name, part in self.slices.items()}

    def live(self) -> dict[str, Tensor]:
        """The net's own tensors, in its dtype, as views."""
        return self.views_by_name(self._live)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse tensors of another net; the error names a missing, extra or misshapen one."""
        expected = {name: tuple(shape) for name, shape in self._shapes.items()}
        given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for name in sorted(expected.keys() | given.keys()):
            if expected.get(name) != given.get(name):
                raise ConfigError.of(
                    f"state tensor {name}", given.get(name), f"must be {expected.get(name)} here"
                )

    def fill(self, vector: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Write named tensors into a vector of this layout; the net sees new weights at once."""
        self.check(tensors)
        for name, part in self.slices.items():
            vector[part] = tensors[name].reshape(-1).to(vector)
        if vector is self.master:
            self._refresh()

    def reset_moments(self) -> None:
        self.moment1.zero_()
        self.moment2.zero_()

    def _refresh(self) -> None:
        if self.master is not self._live:
            self._live.copy_(self.master)
