"""Ranks of a trainer against one: real processes over gloo."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.direct_worker import offer_models
from harness.rank_engine import generate_alone, publish
from harness.rank_processes import DEADLINE_S, RankProcesses, rank_environment, rank_processes
from harness.rank_training import KINDS, NET, create, largest_difference, run_steps, tensors_of
from slackwater.model.errors import ConfigError, NotFoundError
from slackwater.nets.loading import load_net, net_shapes, save_net
from slackwater.nets.ranks import EXIT_RANK_LOST, RankPlan
from slackwater.training.packed_pass import divide_among_ranks
from slackwater.training.trainer import Trainer
from slackwater.weights.directory import DirectoryWeightStore
from slackwater.weights.plan.layout import Layout
from slackwater.weights.plan.shard_map import ShardMap

STEPS = 2
LAYOUTS = ["dp=2", "tp=2"]
CLOSE = 1e-5


def test_two_ranks_learn_what_one_learns_and_every_layout_reads_their_states(
    tmp_path: Path,
) -> None:
    arguments = {"layouts": LAYOUTS, "steps": STEPS, "folder": str(tmp_path)}
    alone, logprobs = {}, {}
    save_net(load_net(NET, seed=3), tmp_path / "base")
    offer_models(tmp_path, {"base": tmp_path / "base"})
    publish(tmp_path)
    function = "harness.rank_worker:train_then_work"
    with rank_processes("dp=2", function, arguments, tmp_path) as ranks:
        for kind in KINDS:
            trainer = create(kind)
            logprobs[kind] = list(run_steps(trainer, range(STEPS)))[-1]
            trainer.save(tmp_path / "one" / kind)
            alone[kind] = tensors_of(tmp_path / "one" / kind)
        generated = generate_alone(tmp_path)
        check_worker(tmp_path, ranks)
    for rank, other in ((0, "tp=2"), (1, "dp=2")):
        refused = (tmp_path / f"refused{rank}").read_text()
        assert refused.startswith(f"version of rank {1 - rank}: ") and "\n" not in refused
        assert f"'layout': '{other}'" in refused.partition("must be")[0]
    check_engine(generated, json.loads((tmp_path / "engine.json").read_text()))
    for kind in KINDS:
        for layout in LAYOUTS:
            folder = tmp_path / layout / kind
            end = tensors_of(folder / "end")
            assert largest_difference(alone[kind], end) < CLOSE
            assert largest_difference(end, tensors_of(folder / "again")) == 0.0
            with np.load(folder / "logprobs.npz") as stored:
                for ours, theirs in zip(logprobs[kind], stored.values(), strict=True):
                    assert ours == pytest.approx(theirs, abs=CLOSE)
        taken = tensors_of(tmp_path / "tp=2" / kind / "taken")
        assert largest_difference(tensors_of(tmp_path / "dp=2" / kind / "end"), taken) == 0.0
    whole = tmp_path / "dp=2" / "full" / "end"
    (whole / "trainer-00002-of-00002.safetensors").unlink()
    with pytest.raises(NotFoundError, match="trainer-00002-of-00002"):
        Trainer.load(whole)


def check_engine(alone: dict[str, Any], together: dict[str, Any]) -> None:
    """Two ranks say the same, over adapters, versions and cached prefixes."""
    assert together["cached"] == alone["cached"] > 0
    assert together["turns"].keys() == alone["turns"].keys()
    for request, turn in alone["turns"].items():
        ours, theirs = np.array(turn), np.array(together["turns"][request])
        assert ours[:, 0].tolist() == theirs[:, 0].tolist()
        assert ours[:, 1] == pytest.approx(theirs[:, 1], abs=1e-4)


def check_worker(folder: Path, ranks: RankProcesses) -> None:
    """Rank 0 answered for both, their parts are versions, and neither outlives the other."""
    until_s = time.monotonic() + DEADLINE_S
    answers: list[tuple[str, int, str]] = []
    while not answers or answers[-1][:2] != ("OpDone", 11):
        assert time.monotonic() < until_s and None in (p.poll() for p in ranks.processes), [
            (folder / f"rank{rank}.log").read_text()[-2000:] for rank in (0, 1)
        ]
        time.sleep(0.05)
        if (folder / "answers").is_file():
            lines = (folder / "answers").read_text().split("\n")[:-1]
            answers = [tuple(json.loads(line)) for line in lines]
    failed = {op: error for kind, op, error in answers if kind == "OpFailed"}
    assert list(failed) == [4, 7]
    assert "advantages" in failed[4] and "trainer.safetensors" in failed[7]
    assert [op for kind, op, _ in answers if kind == "OpDone"] == [0, 1, 2, 3, 5, 6, 8, 9, 10, 11]
    ranks.kill(1)
    assert ranks.processes[0].wait(DEADLINE_S) == EXIT_RANK_LOST
    store = DirectoryWeightStore(folder / "weights")
    assert store.versions() == ("adapter", "new", "v1", "v2")
    alone = tensors_of(folder / "one" / "full")
    for name, tensor in store.pull("v2").items():
        assert float((tensor - alone[f"weight.{name}"]).abs().max()) < CLOSE
    layout = Layout.parse("tp=2")
    shards = ShardMap(net_shapes(NET), NET.head_dim, layout)
    for rank in range(layout.ranks):
        held = shards.rank(rank)
        tensors, came = store.pull_slices("v2", held)
        assert came == sum(4 * piece.box.elements for piece in held.pieces)
        whole = store.pull("v2")
        for piece in held.pieces:
            index = tuple(map(slice, piece.box.start, piece.box.stop))
            assert tensors[piece.tensor].equal(whole[piece.tensor][index])
    store.drop("v1")
    assert "v1" not in store.versions() and not list((folder / "weights").glob("v1*"))


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1)), min_size=1, max_size=12),
    st.integers(1, 5),
)
def test_no_other_way_to_share_neighbours_out_has_a_shorter_longest_share(
    sequences: list[tuple[int, float]], ranks: int
) -> None:
    alone = [cost for cost, _ in sequences]
    # At most what the one before it has can be in common.
    further = [
        max(int(cost * part), cost - before, 1)
        for (cost, part), before in zip(sequences, [0, *alone], strict=False)
    ]
    shares = divide_among_ranks(alone, further, ranks)

    def cost(share: range) -> int:
        return sum(further[i] if i > share.start else alone[i] for i in share)

    assert len(shares) == ranks
    assert [index for share in shares for index in share] == list(range(len(alone)))
    best = [[0] + [10**9] * len(alone)]
    for _ in range(ranks):
        last = best[-1]
        best.append(
            [
                min(max(last[a], cost(range(a, b))) for a in range(b + 1))
                for b in range(len(alone) + 1)
            ]
        )
    assert max(map(cost, shares)) == best[-1][-1]


def test_groups_of_a_prompt_stay_together() -> None:
    alone, behind = [30] * 8, [10] * 8
    for first in (0, 4):
        behind[first] = 28  # another prompt, the same system prompt
    assert divide_among_ranks(alone, behind, 2) == [range(0, 4), range(4, 8)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLACKWATER_LAYOUT": "tp=3"}, "must have 2 ranks"),
        ({"SLACKWATER_LAYOUT": "tp=two"}, "such as tp=2"),
        ({"SLACKWATER_LAYOUT": "pp=2"}, "such as tp=2"),
        ({"SLACKWATER_RANK": "2"}, "below 2"),
        ({"SLACKWATER_RANK": ""}, "whole number"),
        ({"SLACKWATER_RENDEZVOUS": "there"}, "tcp://HOST:PORT"),
        ({"SLACKWATER_RANK_DEADLINE_S": "soon"}, "whole number"),
        ({"SLACKWATER_RANK_BACKEND": "mpi"}, "nccl or gloo"),
    ],
)
def test_a_rank_is_refused_with_one_clear_error(changed: dict[str, str], message: str) -> None:
    plan = RankPlan(1, Layout.parse("tp=2"), "tcp://127.0.0.1:29000")
    assert RankPlan.from_environment(rank_environment(plan)) == plan
    assert RankPlan.from_environment({}) is None
    with pytest.raises(ConfigError, match=message):
        RankPlan.from_environment(rank_environment(plan) | changed)
