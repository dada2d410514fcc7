"""How adapters and a step's numbers are laid out for CUDA: arithmetic that needs no GPU."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from slackwater.engine.cuda.adapter_rows import (
    DECODE_TILE,
    UNIT,
    AdapterSlot,
    RankPool,
    extent_of,
    most_tiles,
    row_columns,
    tile_columns,
    units_of,
)
from slackwater.engine.cuda.sites import CudaProductSite
from slackwater.engine.cuda.step_shape import StepShape, graph_rows, input_columns
from slackwater.engine.executor import RowBatch, SamplingColumns
from slackwater.nets.config import NetConfig
from slackwater.nets.lora import LoraAdapter, LoraSpec

CONFIG = NetConfig()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 100)), max_size=60))
def test_adapters_never_lie_over_each_other_and_room_is_used_again(
    moves: list[tuple[bool, int]],
) -> None:
    pool, held = RankPool(), dict[int, int]()
    most = 0
    for adds, rank in moves:
        if adds or not held:
            count = units_of(rank)
            assert UNIT * (count - 1) < rank <= UNIT * count
            first = pool.take(count)
            if first is None:
                pool.grow(pool.next_size(count))
                first = pool.take(count)
            assert first is not None
            held[first] = count
        else:
            first = sorted(held)[rank % len(held)]
            pool.give_back(first, held.pop(first))
        taken = [unit for first, count in held.items() for unit in range(first, first + count)]
        assert len(taken) == len(set(taken))
        assert max(taken, default=0) < max(pool.units, 1)
        most = max(most, pool.units)
    for first, count in held.items():
        pool.give_back(first, count)
    if most:
        assert pool.take(most) == 0


def test_one_jobs_new_versions_take_turns_in_the_same_units() -> None:
    pool = RankPool()
    pool.grow(pool.next_size(2))
    old = pool.take(2)
    for _ in range(10):
        new = pool.take(2)
        assert old is not None and new is not None and new < 4
        pool.give_back(old, 2)
        old = new
    assert pool.units == 8


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, AdapterSlot]]]:
    """Rows, and adapters side by side in the stacks, each with a run of the rows."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=6))
    spans, row, unit = [], 0, 0
    for units, count in sizes:
        if units:
            spans.append((row, row + count, AdapterSlot(unit, units, float(units))))
        row, unit = row + count, unit + units
    return max(row, 1) + draw(st.integers(0, 5)), spans


@given(batches())
def test_every_row_is_in_one_tile_of_its_own_adapter(
    batch: tuple[int, list[tuple[int, int, AdapterSlot]]],
) -> None:
    rows, spans = batch
    wanted = row_columns(rows, spans)
    seen = np.zeros(rows, np.int64)
    tiles = tile_columns(rows, spans, DECODE_TILE)
    for first, count, *fields in tiles.tolist():
        assert 0 < count <= DECODE_TILE
        seen[first : first + count] += 1
        assert (wanted[first : first + count] == fields).all()
    assert (seen == 1).all()
    extent = extent_of(max((held.first + held.units for _, _, held in spans), default=1))
    if spans:
        assert len(tiles) <= most_tiles(rows, extent) + len(spans), "one more for each gap between"


def test_a_steps_numbers_are_found_where_the_graph_reads_them() -> None:
    shape = StepShape(rows=graph_rows(19), spans=1, extent=4, table_width=8)
    buffer = np.full(10_000, -7, np.int32)
    rng = np.random.default_rng(0)
    tables = rng.integers(1, 99, (40, 20)).astype(np.int32)
    slots = rng.permutation(40)[:19]
    batch = RowBatch(np.arange(19), np.arange(19) + 50, slots, np.arange(19), (), True)
    numbers = rng.random((2, 19)).astype(np.float32)
    columns = SamplingColumns(numbers[0], numbers[0], np.zeros(19, np.int64), numbers[1])
    words = shape.fill(buffer, batch, tables, columns)
    shape.fill_adapters(buffer, [(3, 9, AdapterSlot(2, 2, 0.5))])
    assert (buffer[words:] == -7).all()
    read = {name: buffer[start:stop] for name, (start, stop) in input_columns(shape).items()}
    assert read["tokens"].tolist() == [*range(19), 0, 0, 0, 0, 0]
    assert (read["positions"][:19] == batch.positions).all() and not read["positions"][19:].any()
    assert (read["uniform"].view(np.float32)[:19] == numbers[1]).all()
    lines = read["tables"].reshape(24, 8)
    assert (lines[:19] == tables[slots, :8]).all() and not lines[19:, 0].any()
    assert read["adapted"].reshape(-1, 3)[3].tolist()[:2] == [2, 2]
    assert read["tiles"].reshape(-1, 5)[:, 1].sum() == 24


def test_a_sites_product_gives_outputs_and_low_rank_states_and_survives_growing() -> None:
    config = NetConfig(qkv_bias=True, family="qwen2")
    names = ["q_proj", "k_proj"]
    layers = [torch.nn.Linear(64, 64), torch.nn.Linear(64, 32)]
    kept = [(layer.weight.clone(), layer.bias.clone()) for layer in layers]
    site = CudaProductSite(layers, [f"model.layers.0.self_attn.{name}" for name in names])
    site.reserve(2)
    spec = LoraSpec(20, seed=4)
    adapter = LoraAdapter.create(spec, config)
    with torch.no_grad():
        site.put(adapter, 0, 2)
        site.reserve(4)
        x = torch.randn(3, 64)
        for product in (site.product, site.invariant_product):
            out = product(x, 2)[0]
            start = 0
            for part, (name, (weight, bias)) in enumerate(zip(names, kept, strict=True)):
                plain = torch.nn.functional.linear(x, weight, bias)
                torch.testing.assert_close(out[:, start : start + len(weight)], plain)
                start += len(weight)
                pair = adapter.pair(f"model.layers.0.self_attn.{name}")
                assert pair is not None
                states = out[:, 96:160].reshape(3, 2, 2, UNIT)[:, :, part].reshape(3, -1)
                torch.testing.assert_close(states[:, :20], x @ pair[0].T)
                assert not states[:, 20:].any()
    assert torch.equal(layers[1].weight, kept[1][0]), "the layers look into the same memory"
