"""Ranks of a trainer against one: real processes over gloo."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.rank_processes import rank_processes
from harness.rank_training import KINDS, create, largest_difference, run_steps, tensors_of
from slackwater.model.errors import ConfigError, NotFoundError
from slackwater.nets.ranks import RankPlan
from slackwater.training.data_parallel import share_out
from slackwater.training.trainer import Trainer
from slackwater.weights.plan.layout import Layout

STEPS = 2
LAYOUTS = ["dp=2", "tp=2"]
CLOSE = 1e-5


def test_two_ranks_learn_what_one_learns_and_every_layout_reads_their_states(
    tmp_path: Path,
) -> None:
    arguments = {"layouts": LAYOUTS, "steps": STEPS, "folder": str(tmp_path)}
    alone, logprobs = {}, {}
    with rank_processes("dp=2", "harness.rank_training:train", arguments, tmp_path) as ranks:
        for kind in KINDS:
            trainer = create(kind)
            logprobs[kind] = list(run_steps(trainer, range(STEPS)))[-1]
            trainer.save(tmp_path / "one" / kind)
            alone[kind] = tensors_of(tmp_path / "one" / kind)
        assert ranks.wait() == [0, 0], (tmp_path / "rank0.log").read_text()
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
    shares = share_out(alone, further, ranks)

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
    assert share_out(alone, behind, 2) == [range(0, 4), range(4, 8)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLACKWATER_LAYOUT": "tp=3"}, "must have 2 ranks"),
        ({"SLACKWATER_LAYOUT": "tp=two"}, "such as tp=2,dp=2"),
        ({"SLACKWATER_LAYOUT": "pp=2"}, "tp and dp only"),
        ({"SLACKWATER_RANK": "2"}, "below 2"),
        ({"SLACKWATER_RANK": ""}, "whole number"),
        ({"SLACKWATER_RENDEZVOUS": "there"}, "tcp://HOST:PORT"),
    ],
)
def test_a_rank_is_refused_with_one_clear_error(changed: dict[str, str], message: str) -> None:
    plan = RankPlan(1, Layout.parse("tp=2"), "tcp://127.0.0.1:29000")
    assert RankPlan.from_environment(plan.to_environment()) == plan
    assert RankPlan.from_environment({}) is None
    with pytest.raises(ConfigError, match=message):
        RankPlan.from_environment(plan.to_environment() | changed)
