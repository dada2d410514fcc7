"""A decode step that is begun before its tokens are seen on the host is the step that is wanted
next.
"""

import random
from typing import Any

import numpy as np
import pytest
import tiny_engine
import torch
from numpy.typing import NDArray
from tiny_engine import KV_BYTES_PER_BLOCK, prompt, request
from torch import Tensor

from slackwater.engine.config import EngineConfig
from slackwater.engine.cpu.executor import CpuExecutor
from slackwater.engine.cuda.step_shape import QueuedStep
from slackwater.engine.engine import Engine
from slackwater.engine.executor import RowBatch, SamplingColumns
from slackwater.engine.request import GenerationRequest
from slackwater.nets.causal_lm import CausalLM


class Foreseeing(CpuExecutor):
    """Writes down what a device would have begun, and counts how often that was what came next."""

    begins_ahead = True
    foreseen: QueuedStep | None = None
    hits = begun = 0

    def decode(
        self,
        net: CausalLM,
        batch: RowBatch,
        tables: NDArray[np.int32],
        columns: SamplingColumns,
        ahead: NDArray[np.float32] | None = None,
    ) -> tuple[Tensor, NDArray[np.int64], NDArray[np.float32]]:
        before, self.foreseen = self.foreseen, None
        logits, tokens, logprobs = super().decode(net, batch, tables, columns)
        if before is not None:
            rows = before.rows_of(net, batch, tables, columns, [])
            self.hits += rows is not None
            if rows is not None:
                assert np.array_equal(before.answer.numpy()[rows], tokens)
        if ahead is not None:
            self.begun += 1
            positions, slots = batch.positions + 1, batch.slots
            blocks = tables[slots, positions // self.block_tokens]
            assert (blocks > 0).all(), "a step that is begun has a block for every row"
            assert len(set(blocks.tolist())) == len(blocks)
            later = RowBatch(tokens, positions, slots, batch.logit_rows, (), True)
            next_columns = SamplingColumns(columns.temperature, columns.top_p, columns.top_k, ahead)
            made, drawn, _ = super().decode(net, later, tables, next_columns)
            self.foreseen = QueuedStep(
                net,
                later,
                next_columns,
                [],
                tables[slots].copy(),
                made,
                torch.from_numpy(drawn),
                0,
                self.block_tokens,
                tokens,
            )
        return logits, tokens, logprobs

    def logits(self, net: CausalLM, batch: RowBatch, tables: NDArray[np.int32]) -> Tensor:
        if not batch.decode_only:
            self.foreseen = None
        return super().logits(net, batch, tables)


def new_engine(blocks: int, executor_type: type[CpuExecutor]) -> Engine:
    config = EngineConfig(
        kv_bytes=(blocks + 1) * KV_BYTES_PER_BLOCK,
        page_bytes=4096,
        max_running=6,
        max_step_tokens=64,
    )
    net = tiny_engine.net()
    return Engine(net, config, executor=executor_type(net.config, config), eos_token_ids=(3,))


def arrivals(seed: int) -> list[tuple[int, GenerationRequest]]:
    """Requests by the step before which they come: some shaped, some cut, some that end early."""
    rng = random.Random(seed)
    kinds: list[dict[str, Any]] = [{}, {}, {}, {"top_k": 5}, {"logit_bias": ((4, 1.0),)}]
    return [
        (
            rng.choice((0, 0, 5, 40, 41)),
            request(
                number,
                prompt(number % 3, rng.choice((1, 15, 16, 33))),
                max_tokens=rng.choice((1, 2, 20, 70)),
                seed=number,
                **rng.choice(kinds),
            ),
        )
        for number in range(12)
    ]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("blocks", [12, 200])
def test_what_was_foreseen_comes_and_answers_are_as_without_looking_ahead(
    seed: int, blocks: int
) -> None:
    answers = []
    for kind in (CpuExecutor, Foreseeing):
        engine = new_engine(blocks, kind)
        waiting = sorted(arrivals(seed), key=lambda pair: pair[0])
        tokens: dict[int, list[int]] = {}
        step = 0
        aborting = random.Random(seed)
        while waiting or engine.busy:
            while waiting and waiting[0][0] <= step:
                engine.add(waiting.pop(0)[1])
            out = engine.step()
            for number, token in zip(out.request_ids.tolist(), out.tokens.tolist(), strict=True):
                tokens.setdefault(number, []).append(token)
            engine.check_integrity()
            step += 1
            if aborting.random() < 0.02:
                engine.abort(aborting.randrange(12))
            assert step < 5000
        answers.append(tokens)
        executor = engine._executor
        if isinstance(executor, Foreseeing) and blocks == 200:
            assert executor.hits >= executor.begun / 2
    if blocks == 200:  # else who is preempted differs, and with it who is aborted when
        assert answers[0] == answers[1]


def test_requests_that_only_decode_have_every_step_foreseen() -> None:
    engine = new_engine(200, Foreseeing)
    for number in range(4):
        engine.add(request(number, prompt(number, 5), max_tokens=60, seed=number, ignore_eos=True))
    while engine.busy:
        engine.step()
    executor = engine._executor
    assert isinstance(executor, Foreseeing)
    assert executor.hits == executor.begun == 58
