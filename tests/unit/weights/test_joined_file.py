"""What several ranks published, as one file for other tools."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slackwater.model.errors import ConfigError
from slackwater.model.uri import part_of
from slackwater.weights.directory import DirectoryWeightStore
from slackwater.weights.joined_file import join_files
from slackwater.weights.plan.layout import Layout
from slackwater.weights.plan.shard_map import Box, ShardMap
from slackwater.weights.plan.transfer import plan_publishing

SHAPES = {
    "model.embed_tokens.weight": (13, 8),
    "model.layers.0.self_attn.q_proj.weight": (16, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 16),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
    "model.norm.weight": (8,),
}


@pytest.mark.parametrize("layout", ["dp=4", "tp=2", "tp=2,dp=2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_parts_of_any_layout_are_joined_to_the_tensors_they_are_of(
    layout: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    parsed, store = Layout.parse(layout), DirectoryWeightStore(tmp_path / "weights")
    whole = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
    slices = plan_publishing(ShardMap(SHAPES, 4, parsed), small=1)
    for rank in range(parsed.ranks):
        mine = {
            each.name: whole[each.tensor][each.box.index_in(Box.whole(SHAPES[each.tensor]))]
            for each in slices
            if each.rank == rank
        }
        store.publish(part_of("v", rank, parsed.ranks), mine, {})
    assert store.paths("v") == (store.path("v"),)  # not a version yet
    store.publish("v", {}, {"parts": parsed.ranks})
    parts = store.paths("v")
    assert len(parts) == parsed.ranks and all(path.is_file() for path in parts)
    join_files(parts, tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_a_rank_that_claims_more_than_it_wrote_makes_no_file(tmp_path: Path) -> None:
    """One element at the end of a tensor of terabytes, as a hostile node could name it."""
    part = tmp_path / "part.safetensors"
    save_file({f"w[{(1 << 42) - 1}:{1 << 42}]": torch.ones(1)}, part)
    with pytest.raises(ConfigError, match="parts that hold every element"):
        join_files([part], tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()
