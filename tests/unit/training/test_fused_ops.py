"""The compiled small operators mean what PyTorch's do, forward and backward."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slackwater.nets.ops import HeadNorms, NetOps, Rotation
from slackwater.training.fused_ops import FusedOps

Case = Callable[[NetOps, list[Tensor]], tuple[Tensor, ...]]


def random_tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def rotation(rows: int, half: int) -> Rotation:
    angles = torch.arange(rows * half).view(rows, half) * 0.37
    return Rotation(angles.cos(), angles.sin())


def turned(ops: NetOps, given: list[Tensor]) -> tuple[Tensor, ...]:
    return ops.rotate(
        (given[0], given[1], given[2]), rotation(7, 4), HeadNorms(8, None, None, 1e-6)
    )


def normed_and_turned(ops: NetOps, given: list[Tensor]) -> tuple[Tensor, ...]:
    norms = HeadNorms(8, given[3], given[4], 1e-6)
    return ops.rotate((given[0], given[1], given[2]), rotation(7, 4), norms)


CASES: dict[str, tuple[Case, list[tuple[int, ...]]]] = {
    "norm": (lambda ops, t: (ops.rms_norm(t[0], t[1], 1e-5),), [(5, 24), (24,)]),
    "add and norm": (
        lambda ops, t: ops.add_rms_norm(t[0], t[1], t[2], 1e-5),
        [(5, 24), (5, 24), (24,)],
    ),
    "turn": (turned, [(7, 32), (7, 16), (7, 16)]),
    "norm and turn": (normed_and_turned, [(7, 32), (7, 16), (7, 16), (8,), (8,)]),
    "gate": (lambda ops, t: (ops.silu_mul(t[0], t[1]),), [(5, 40), (5, 40)]),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_plain_operators(name: str) -> None:
    case, shapes = CASES[name]
    results = []
    for ops in (NetOps(), FusedOps()):
        given = random_tensors(*shapes)
        outputs = case(ops, given)
        weights = random_tensors(*(tuple(output.shape) for output in outputs))
        sum((o * w.detach()).sum() for o, w in zip(outputs, weights, strict=True)).backward()  # type: ignore[union-attr]
        results.append([*outputs, *(tensor.grad for tensor in given)])
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
