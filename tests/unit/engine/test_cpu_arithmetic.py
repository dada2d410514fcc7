"""The CPU kernels: right against plain formulas, and the same bits in every batch."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn import functional

from harness.packed_attention import PackedCausalAttention
from slackwater.engine.cpu.attention import BLOCK_TOKENS, attend_rows
from slackwater.engine.cpu.compiled import exp_nonpositive, lane_max, lane_sum
from slackwater.engine.cpu.forward_pass import CpuForwardPass, PagedRows
from slackwater.engine.cpu.ops import add_and_norm_rows, norm_rows, silu_mul_rows
from slackwater.engine.cpu.panel_kernel import PANEL
from slackwater.engine.cpu.panel_writer import LINE, PanelWriter
from slackwater.engine.cpu.weights import (
    Floats,
    LibraryWeight,
    PanelWeight,
    SiteAdapters,
)
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net, net_tensors
from slackwater.nets.lora import LoraAdapter, LoraSpec
from slackwater.nets.ops import HeadNorms, NetOps, Rotation

torch.set_num_threads(1)
SHAPES = [(96, 32), (48, 96), (61, 32), (33, 47), (640, 576), (8, 576), (576, 8), (100, 3000)]


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator)


@dataclass
class Problem:
    x: Floats
    values: Floats
    weight: PanelWeight | LibraryWeight

    def product(self, rows: slice = slice(None)) -> Floats:
        out = np.full((len(self.x[rows]), len(self.values)), np.nan, np.float32)
        self.weight.product(self.x[rows], out)
        return out


def written(weight: PanelWeight | LibraryWeight, first: int, values: Floats) -> None:
    writer = PanelWriter()
    weight.write(first, torch.from_numpy(values), writer)
    writer.run()


def weights(width: int, depth: int, kind: type[PanelWeight] | type[LibraryWeight]) -> Problem:
    generator = torch.Generator().manual_seed(width + depth)
    values = torch.randn(width, depth, generator=generator)
    x = torch.randn(300, depth, generator=generator)
    weight = kind(width, depth)
    written(weight, 0, values.numpy())
    return Problem(x.numpy(), values.numpy(), weight)


@pytest.mark.parametrize(("width", "depth"), SHAPES)
def test_a_row_has_the_same_bits_in_a_product_of_any_size(width: int, depth: int) -> None:
    problem = weights(width, depth, PanelWeight)
    whole = problem.product()
    np.testing.assert_allclose(whole, problem.x @ problem.values.T, rtol=1e-4, atol=3e-4)
    for rows in (1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 15, 16, 17, 40, 64, 65, 255, 257):
        assert np.array_equal(problem.product(slice(rows)), whole[:rows]), rows
        last = slice(300 - rows, 300)
        assert np.array_equal(problem.product(last), whole[last]), rows


def test_a_row_has_the_same_bits_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = weights(1100, 576, PanelWeight)
    alone = problem.product()
    for threads in (2, 3, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        assert np.array_equal(problem.product(), alone)


@pytest.mark.parametrize("kind", [PanelWeight, LibraryWeight])
@pytest.mark.parametrize(("width", "depth"), [(61, 32), (96, 17)])
def test_a_product_can_be_added_to_what_is_there(
    width: int, depth: int, kind: type[PanelWeight] | type[LibraryWeight]
) -> None:
    problem = weights(width, depth, kind)
    out = np.ones((300, width), np.float32)
    problem.weight.product(problem.x, out, adds=True)
    np.testing.assert_allclose(out, 1 + problem.x @ problem.values.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [PanelWeight, LibraryWeight])
def test_rows_of_a_weight_are_written_where_they_belong(
    kind: type[PanelWeight] | type[LibraryWeight],
) -> None:
    problem = weights(100, 24, kind)
    fresh = np.random.default_rng(1).random((50, 24), np.float32)
    written(problem.weight, 17, fresh)
    problem.values[17:67] = fresh
    np.testing.assert_allclose(
        problem.product(), problem.x @ problem.values.T, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("shift", [0, 1])  # floats by which the panels miss a line of the caches
@pytest.mark.parametrize(
    ("first", "rows", "depth"), [(0, 64, 48), (0, 70, 37), (5, 64, 16), (32, 33, 7), (31, 98, 100)]
)
def test_every_element_of_written_rows_is_where_its_panel_has_it(
    first: int, rows: int, depth: int, shift: int
) -> None:
    values = np.random.default_rng(first).standard_normal((rows, 2 * depth), np.float32)[:, :depth]
    count = -(-(first + rows) // PANEL)
    memory = np.full(count * depth * PANEL + 32, np.nan, np.float32)
    start = -memory.ctypes.data % LINE // 4 + shift
    panels = memory[start : start + count * depth * PANEL].reshape(count, depth, PANEL)
    for given in (values, np.ascontiguousarray(values)):
        panels[:] = np.nan
        writer = PanelWriter()
        writer.add_panels(torch.from_numpy(given), torch.from_numpy(panels), first)
        writer.run()
        columns = panels.transpose(0, 2, 1).reshape(count * PANEL, depth)
        assert np.array_equal(columns[first : first + rows], values)
        assert np.isnan(columns[:first]).all()
        assert np.isnan(columns[first + rows :]).all()


def test_what_is_written_together_is_written_in_order() -> None:
    values = np.arange(64, dtype=np.float32).reshape(32, 2)
    between, panels = np.zeros((32, 2), np.float32), np.zeros((1, 2, PANEL), np.float32)
    writer = PanelWriter()
    writer.add_copy(torch.from_numpy(values), torch.from_numpy(between))
    writer.add_panels(torch.from_numpy(between), torch.from_numpy(panels), 0)
    assert not between.any() and not panels.any()
    writer.run()
    assert np.array_equal(between, values)
    assert np.array_equal(panels[0].T, values)
    between[:] = 0
    writer.run()
    assert not between.any(), "written twice"


def test_the_compiled_exponential_is_within_two_units_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-87, 0, 100_001), [-1e30, -200, -0.0]]).astype(np.float32)
    found = np.array([exp_nonpositive(value) for value in x[::10]])
    x = x[::10]
    expected = np.exp(np.maximum(x, -87).astype(np.float64))
    assert np.max(np.abs(found / expected - 1)) < 2.5e-7


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 100])
def test_a_lane_sum_is_the_sum(count: int) -> None:
    values = np.random.default_rng(count).random(128).astype(np.float32)
    found = lane_sum(values, count)
    assert found == pytest.approx(values[:count].sum(dtype=np.float64), rel=1e-6)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 100])
def test_a_lane_maximum_is_the_maximum(count: int) -> None:
    values = np.random.default_rng(count).normal(size=128).astype(np.float32) - 2
    assert lane_max(values, count) == values[:count].max()


def test_compiled_ops_are_the_plain_ones() -> None:
    plain, eps = NetOps(), np.float32(1e-6)
    x, residual, weight = random(7, 48), random(7, 48), random(48)
    expected, total = plain.add_rms_norm(x, residual, weight, 1e-6)
    found, added = np.empty((7, 48), np.float32), residual.clone().numpy()
    add_and_norm_rows(x.numpy(), added, weight.numpy(), eps, found)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(added, total, rtol=1e-5, atol=1e-5)
    norm_rows(x.numpy(), weight.numpy(), eps, found)
    np.testing.assert_allclose(found, plain.rms_norm(x, weight, 1e-6), rtol=1e-5, atol=1e-5)
    gate_up, gated = random(7, 100) * 20, np.empty((7, 50), np.float32)
    silu_mul_rows(gate_up.numpy(), gated)
    expected = plain.silu_mul(gate_up[:, :50], gate_up[:, 50:])
    np.testing.assert_allclose(gated, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 8), (9, 3, 64), (3, 3, 20)])
def test_paged_attention_is_attention(heads: int, kv_heads: int, size: int, normed: bool) -> None:
    """Prompts in scattered blocks, the memory around them full of NaN."""
    lengths = [1, 16, 17, 45]
    block_floats = 2 * 2 * kv_heads * size * BLOCK_TOKENS
    cache = np.full(20 * block_floats, np.nan, np.float32)
    tables = np.random.default_rng(0).permutation(np.arange(1, 17)).reshape(4, 4).astype(np.int32)
    slots = np.repeat(np.arange(4), lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    rows = len(slots)
    qkv, cos, sin = (
        random(rows, (heads + 2 * kv_heads) * size),
        random(45, size // 2),
        random(45, size // 2),
    )
    weight = random(size)
    norm = weight.numpy() if normed else np.empty(0, np.float32)
    found = np.empty((rows, heads, size), np.float32)
    attend_rows(
        qkv.reshape(-1).numpy(), norm, norm, np.float32(1e-6), cos.reshape(-1).numpy(),
        sin.reshape(-1).numpy(), cache, np.uint64(1), np.uint64(block_floats), tables, slots,
        positions, np.uint64(heads), np.uint64(kv_heads), found.reshape(-1),
    )  # fmt: skip
    parts = qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=1)
    at = torch.from_numpy(positions)
    norms = HeadNorms(size, weight if normed else None, weight if normed else None, 1e-6)
    q, k, v = NetOps().rotate(parts, Rotation(cos[at], sin[at]), norms)
    start = 0
    for length in lengths:
        span = slice(start, start + length)
        wide = (x[span].repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q[span], *wide))
        expected = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        np.testing.assert_allclose(found[span], expected[0].transpose(0, 1), rtol=1e-4, atol=1e-5)
        start += length


@pytest.mark.parametrize("kind", [PanelWeight, LibraryWeight])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_forward_pass_is_the_model(
    family: str, kind: type[PanelWeight] | type[LibraryWeight]
) -> None:
    """Two prompts, one of them through an adapter, against the model as it is defined."""
    config = NetConfig(family=family, qk_norm=family == "qwen3", qkv_bias=family == "qwen2")
    net, same = load_net(config, seed=1), load_net(config, seed=1)
    for model in (net, same):
        with torch.no_grad():
            for name, tensor in net_tensors(model).items():
                if tensor.ndim == 1:
                    tensor.copy_(torch.linspace(0.5, 1.5, len(tensor)) + len(name) / 50)
    adapter = LoraAdapter.create(LoraSpec(rank=4, seed=3), config)
    for tensor in adapter.tensors.values():
        tensor += 0.05 * random(*tensor.shape)
    tokens = torch.randint(0, config.vocab_size, (30,), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(12), torch.arange(18)])
    run = CpuForwardPass(net, kind)
    floats = config.kv_values_per_token * BLOCK_TOKENS
    tables, slots = np.array([[1, 2], [3, 4]], np.int32), np.repeat([0, 1], [12, 18])
    cache = np.full(5 * floats, np.nan, np.float32)
    rows = PagedRows(cache, np.uint64(floats), tables, slots, positions.numpy())
    spans = [(12, 30, SiteAdapters(adapter, run.sites(), kind))]
    hidden = run.run_layers(tokens.numpy(), rows, spans)
    found = run.logits(hidden, spans)
    attention = PackedCausalAttention((0, 12, 30))
    for prompt, own in ((slice(0, 12), None), (slice(12, 30), adapter)):
        with torch.no_grad():
            states = same.run_layers(tokens, positions, attention, adapter=own)
            expected = same.logits(states, adapter=own)
        np.testing.assert_allclose(hidden[prompt], states[prompt], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found[prompt], expected[prompt], rtol=1e-4, atol=1e-4)
