"""The CPU kernels: right against plain formulas, and the same bits in every batch."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from slackwater.engine.cpu import linear as linear_module
from slackwater.engine.cpu.attention import BLOCK_TOKENS, CpuPagedAttention
from slackwater.engine.cpu.compiled import exp_into, lane_sum
from slackwater.engine.cpu.linear import LADDER, InvariantLinear, ShapePlan
from slackwater.engine.cpu.ops import CpuOps
from slackwater.nets.ops import HeadNorms, PlainOps, Rotation

torch.set_num_threads(1)
SHAPES = [(96, 32), (48, 96), (61, 32), (33, 47), (640, 576), (8, 576), (576, 8), (100, 1000)]


def weights(width: int, depth: int, by_column: bool) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(width + depth)
    weight = torch.randn(width, depth, generator=generator)
    x = torch.randn(300, depth, generator=generator)
    return x, weight.T.contiguous().T if by_column else weight


@pytest.mark.parametrize("by_column", [True, False])
@pytest.mark.parametrize(("width", "depth"), SHAPES)
def test_a_row_has_the_same_bits_in_a_product_of_any_size(
    width: int, depth: int, by_column: bool
) -> None:
    x, weight = weights(width, depth, by_column)
    linear = InvariantLinear()
    whole = linear(x, weight, None)
    torch.testing.assert_close(whole, functional.linear(x, weight), rtol=1e-4, atol=1e-4)
    for rows in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 40, 64, 65, 255, 257):
        assert torch.equal(linear(x[:rows], weight, None), whole[:rows]), rows
        assert torch.equal(linear(x[300 - rows :], weight, None), whole[300 - rows :]), rows


def test_a_library_whose_rows_depend_on_the_batch_is_left_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where every size of product disagrees, our own loop takes all rows."""

    def moody(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weight) + torch.arange(x.shape[0])[:, None] * 1e-3

    class Library:
        linear = staticmethod(moody)

    monkeypatch.setattr(linear_module, "functional", Library)
    x, weight = weights(40, 24, True)
    linear = InvariantLinear()
    assert linear._tried(40, 24, True) == ShapePlan((), 24)
    whole = linear(x, weight, None)
    torch.testing.assert_close(whole, x @ weight.T, rtol=1e-4, atol=1e-4)
    assert torch.equal(linear(x[100:107], weight, None), whole[100:107])


def test_sizes_that_disagree_leave_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd_at_32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weight) + (1e-3 if x.shape[0] == 32 else 0.0)

    class Library:
        linear = staticmethod(odd_at_32)

    monkeypatch.setattr(linear_module, "functional", Library)
    plan = InvariantLinear()._tried(40, 24, True)
    assert 32 not in plan.ladder
    assert 16 in plan.ladder
    assert set(plan.ladder) < set(LADDER)


def test_the_compiled_exponential_is_within_two_units_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-87, 0, 100_001), [-1e30, -200, -0.0]]).astype(np.float32)
    found = x.copy()
    exp_into(found, len(found), np.empty(len(found), np.int32))
    expected = np.exp(np.maximum(x, -87).astype(np.float64))
    assert np.max(np.abs(found / expected - 1)) < 2.5e-7


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 100])
def test_a_lane_sum_is_the_sum(count: int) -> None:
    values = np.random.default_rng(count).random(128).astype(np.float32)
    found = lane_sum(values, count, np.empty(16, np.float32))
    assert found == pytest.approx(values[:count].sum(dtype=np.float64), rel=1e-6)


def test_compiled_ops_are_the_plain_ones() -> None:
    plain, ours = PlainOps(), CpuOps(batch_invariant=True)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, residual, weight = random(7, 48), random(7, 48), random(48)
    expected = plain.add_rms_norm(x, residual, weight, 1e-6)
    found = ours.add_rms_norm(x, residual.clone(), weight, 1e-6)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        ours.rms_norm(x, weight, 1e-6), plain.rms_norm(x, weight, 1e-6), rtol=1e-5, atol=1e-5
    )
    gate_up = random(7, 100) * 20
    halves = (gate_up[:, :50], gate_up[:, 50:])
    torch.testing.assert_close(ours.silu_mul(*halves), plain.silu_mul(*halves))
    qkv, rotation = random(7, 64), Rotation(random(7, 4), random(7, 4))
    parts = (qkv[:, :32], qkv[:, 32:48], qkv[:, 48:])
    for norms in (HeadNorms(8, None, None, 1e-6), HeadNorms(8, random(8), random(8), 1e-6)):
        pairs = zip(
            ours.rotate(parts, rotation, norms), plain.rotate(parts, rotation, norms), strict=True
        )
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 8), (9, 3, 64), (3, 3, 20)])
def test_paged_attention_is_attention(heads: int, kv_heads: int, size: int) -> None:
    """Prompts in scattered blocks, the memory around them full of NaN."""
    generator = torch.Generator().manual_seed(heads)
    lengths = [1, 16, 17, 45]
    cache = np.full((20, 2 * 2 * kv_heads * size * BLOCK_TOKENS), np.nan, np.float32)
    tables = np.random.default_rng(0).permutation(np.arange(1, 17)).reshape(4, 4).astype(np.int32)
    slots = np.repeat(np.arange(4), lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    rows = len(slots)
    q = torch.randn(rows, heads, size, generator=generator)
    k, v = (torch.randn(rows, kv_heads, size, generator=generator) for _ in range(2))
    found = CpuPagedAttention(cache, tables, slots, positions)(1, q, k, v)
    start = 0
    for length in lengths:
        span = slice(start, start + length)
        wide = (x[span].repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        inputs = (x.transpose(0, 1)[None] for x in (q[span], *wide))
        expected = functional.scaled_dot_product_attention(*inputs, is_causal=True)
        torch.testing.assert_close(found[span], expected[0].transpose(0, 1), rtol=1e-4, atol=1e-5)
        start += length
