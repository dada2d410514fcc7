"""A state that four ranks saved, as ranks of any other layout read it."""

from pathlib import Path

import pytest
import torch

from harness.rank_training import LORA, NET
from slackwater.nets.loading import net_shapes
from slackwater.training.state_file import TrainerMeta, read_state, write_shard
from slackwater.weights.plan.layout import Layout
from slackwater.weights.plan.shard_map import Box, ShardMap
from slackwater.weights.plan.transfer import plan_publishing

SAVED = Layout.parse("dp=4")
PARTS = ("weight", "moment1", "moment2")


@pytest.mark.parametrize("layout", ["tp=1", "dp=2", "tp=2", "tp=2,dp=2", "dp=3"])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_every_layout_reads_what_four_ranks_saved(kind: str, layout: str, tmp_path: Path) -> None:
    shapes = net_shapes(NET) if kind == "full" else LORA.tensor_shapes(NET)
    meta = TrainerMeta(
        net=NET.to_hf(), source=None, seed=1, dtype="float32", lora=None, base_sum=None
    )
    drawn = torch.Generator().manual_seed(0)
    whole = {
        part: {name: torch.randn(shape, generator=drawn) for name, shape in shapes.items()}
        for part in PARTS
    }
    slices = plan_publishing(ShardMap(shapes, NET.head_dim, SAVED))
    for rank in range(SAVED.ranks):
        mine = {
            f"{part}.{each.name}": whole[part][each.tensor][
                each.box.index_in(Box.whole(shapes[each.tensor]))
            ]
            for part in PARTS
            for each in slices
            if each.rank == rank
        }
        write_shard(tmp_path, meta, mine, SAVED, rank)
    reader = Layout.parse(layout)
    for rank in range(reader.ranks):
        held = ShardMap(shapes, NET.head_dim, reader).rank(rank)
        state = read_state(tmp_path, held)
        assert state.meta == meta
        for part in PARTS:
            assert {name: tuple(t.shape) for name, t in state.tensors[part].items()} == held.shapes
            for piece in held.pieces:
                index = tuple(map(slice, piece.box.start, piece.box.stop))
                assert state.tensors[part][piece.tensor].equal(whole[part][piece.tensor][index])
