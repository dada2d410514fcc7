"""What tells one frozen base from another: a sum over its weights, computed where they lie.

The weights count as they are in bfloat16, so that the same base loaded in fp32 and in bf16 has the
same sum, and a state may move from one to the other. The arithmetic is on integers modulo 2^64: the
same on every device.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_CHUNK = 1 << 22  # 64-bit words at a time
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that a change of any single word changes the sum
_MODULUS = 1 << 64


def base_sum(tensors: Mapping[str, Tensor]) -> int:
    """A 64-bit number that depends on every weight, its place, and the order of the tensors."""
    return joined_sum(tensor_sum(tensor) for tensor in tensors.values())


@torch.no_grad()
def tensor_sum(tensor: Tensor) -> int:
    """What one tensor adds to the sum of a base."""
    flat = tensor.detach().reshape(-1).to(torch.bfloat16)
    return flat.numel() + _words_sum(flat)


def joined_sum(sums: Iterable[int]) -> int:
    """The sum of a base, from those of its tensors in the net's order."""
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
