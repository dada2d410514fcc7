"""Slices of models, cut and put together again with real arrays."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from slackwater.model.errors import ConfigError
from slackwater.weights.plan.layout import Layout
from slackwater.weights.plan.shard_map import Box, RankShards, ShardMap
from slackwater.weights.plan.transfer import (
    PublishedSlice,
    SliceFetch,
    plan_fetches,
    plan_publishing,
)

Array = NDArray[Any]
HEAD_DIM = 4


def model(
    *, layers: int = 3, kv_heads: int = 2, tied: bool = False, bias: bool = False
) -> dict[str, tuple[int, ...]]:
    """The shapes of a small Qwen-like model with 4 heads; Llama-like without bias and q_norm."""
    hidden, ffn, vocab = 12, 8, 37
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name, rows in (("q", 16), ("k", kv_heads * HEAD_DIM), ("v", kv_heads * HEAD_DIM)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, hidden)
            if bias:
                shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        shapes |= {
            f"{at}self_attn.o_proj.weight": (hidden, 16),
            f"{at}self_attn.q_norm.weight": (HEAD_DIM,),
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
        }
        shapes |= {
            f"{at}mlp.gate_proj.weight": (ffn, hidden),
            f"{at}mlp.up_proj.weight": (ffn, hidden),
            f"{at}mlp.down_proj.weight": (hidden, ffn),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def arrays(shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    """Every element of the model has a number of its own."""
    made, first = {}, 1
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        made[name] = np.arange(first, first + size).reshape(shape)
        first += size
    return made


def place(local: Array, at: tuple[slice, ...], values: Array) -> None:
    assert (local[at] == 0).all()  # nothing is written twice
    local[at] = values


def held(shards: RankShards, whole: dict[str, Array]) -> dict[str, Array]:
    """A rank's own tensors, cut from the model."""
    mine = {name: np.zeros(shape, int) for name, shape in shards.shapes.items()}
    for piece in shards.pieces:
        mine[piece.tensor] = whole[piece.tensor][piece.box.index_in(all_of(whole, piece.tensor))]
    return mine


def all_of(whole: dict[str, Array], tensor: str) -> Box:
    return Box.whole(whole[tensor].shape)


def read(mine: dict[str, Array], shards: RankShards, tensor: str, box: Box) -> Array:
    """A slice of the model, out of a rank's own tensors."""
    return mine[tensor][shards.find(tensor, box)]


LAYOUTS = st.builds(Layout, tp=st.sampled_from([1, 2, 4]), dp=st.integers(1, 3), fsdp=st.booleans())
MODELS = st.builds(
    model,
    layers=st.integers(3, 5),
    kv_heads=st.sampled_from([1, 2, 4]),
    tied=st.booleans(),
    bias=st.booleans(),
)


@given(MODELS, LAYOUTS, LAYOUTS, st.sampled_from([1, 40, 1 << 16]))
@settings(deadline=None, max_examples=60)
def test_every_receiver_ends_with_exactly_its_slices_whatever_the_two_layouts(
    shapes: dict[str, tuple[int, ...]], sending: Layout, receiving: Layout, small: int
) -> None:
    whole = arrays(shapes)
    senders, receivers = (
        ShardMap(shapes, HEAD_DIM, sending),
        ShardMap(shapes, HEAD_DIM, receiving),
    )
    published = plan_publishing(senders, small)
    check_each_element_is_published_once(whole, published)
    ranks = [senders.rank(rank) for rank in range(sending.ranks)]
    theirs = [held(shards, whole) for shards in ranks]
    for rank in range(receiving.ranks):
        shards = receivers.rank(rank)
        plan = plan_fetches(published, shards)
        mine = {name: np.zeros(shape, int) for name, shape in shards.shapes.items()}
        for fetch in plan:
            source = fetch.published.rank
            sent = read(theirs[source], ranks[source], fetch.published.tensor, fetch.published.box)
            tensor = fetch.published.tensor
            place(mine[tensor], fetch.place, sent[fetch.box.index_in(fetch.published.box)])
        expected = held(shards, whole)
        assert mine.keys() == expected.keys()
        for name, array in mine.items():
            assert np.array_equal(array, expected[name]), name
        check_nothing_travels_twice(plan, mine)


def check_each_element_is_published_once(
    whole: dict[str, Array], published: tuple[PublishedSlice, ...]
) -> None:
    times = {name: np.zeros(array.shape, int) for name, array in whole.items()}
    for each in published:
        times[each.tensor][each.box.index_in(all_of(whole, each.tensor))] += 1
    assert all((counts == 1).all() for counts in times.values())


def check_nothing_travels_twice(plan: tuple[SliceFetch, ...], mine: dict[str, Array]) -> None:
    elements = np.concatenate([array.reshape(-1) for array in mine.values()])
    needed = len(np.unique(elements[elements > 0]))
    taken = {(fetch.published, fetch.box) for fetch in plan}  # it may lie in two places
    assert sum(box.elements for _, box in taken) == needed


def test_grouped_heads_are_shared_when_there_are_fewer_than_ranks() -> None:
    shard_map = ShardMap(model(kv_heads=2), HEAD_DIM, Layout(tp=4))
    rows = [
        [
            p.box.start[0]
            for p in shard_map.rank(r).pieces
            if "layers.0.self_attn.k_proj" in p.tensor
        ]
        for r in range(4)
    ]
    assert rows == [[0], [0], [4], [4]]
    assert shard_map.rank(0).shapes["model.layers.0.self_attn.k_proj.weight"] == (4, 12)


def test_the_last_ranks_have_fewer_rows_of_the_vocabulary() -> None:
    shard_map = ShardMap(model(), HEAD_DIM, Layout(tp=4))
    assert [shard_map.rank(r).shapes["lm_head.weight"][0] for r in range(4)] == [10, 10, 10, 7]


def test_replicas_share_the_work_of_publishing() -> None:
    published = plan_publishing(ShardMap(model(), HEAD_DIM, Layout(dp=4)), small=16)
    loads = [sum(p.box.elements for p in published if p.rank == rank) for rank in range(4)]
    assert max(loads) < 1.2 * min(loads)


@pytest.mark.parametrize(
    ("layout", "said"),
    [(Layout(tp=3), "3 must divide 8 columns"), (Layout(tp=8), "8 must divide 4 heads")],
)
def test_a_layout_that_does_not_fit_is_refused(layout: Layout, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ShardMap(model(), HEAD_DIM, layout).rank(0)


def test_an_unknown_parameter_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="conv1d"):
        ShardMap({"model.layers.0.conv1d.weight": (3, 3)}, HEAD_DIM, Layout())
