"""A trainer whose state is switched out between operations ends in the same bits as one that never
is.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from slackwater.model.adam import Adam
from slackwater.model.residency import StateBudgets, Tier
from slackwater.nets.config import NetConfig
from slackwater.nets.lora import LoraSpec
from slackwater.state.device import DeviceTier
from slackwater.state.manager import StateManager
from slackwater.training.datum import Datum
from slackwater.training.managed_state import ManagedState
from slackwater.training.trainer import Trainer

NET = NetConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[StateManager, DeviceTier]]:
    budgets = StateBudgets(600_000, 1 << 24, 1 << 26)
    manager = StateManager(budgets, tmp_path / "disk")
    tier = DeviceTier(manager, "w", budgets.device_bytes)
    manager.attach("w", tier)
    yield manager, tier
    tier.close()
    manager.close()


def datum(seed: int) -> Datum:
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, 97, 12).astype(np.int64)
    targets = draw.integers(0, 97, 12).astype(np.int64)
    return Datum(tokens, {"target_tokens": targets, "weights": np.ones(12, np.float32)})


def operate(trainer: Trainer, step: int) -> float:
    output = trainer.forward_backward([datum(step)], "cross_entropy", {})
    if step % 3 != 2:  # now and then a gradient is left for the next time
        trainer.optim_step(Adam(learning_rate=1e-2))
    return float(output.logprobs[0].sum())


def test_two_adapters_on_one_base_take_turns_where_the_host_holds_one_of_them(
    tmp_path: Path,
) -> None:
    def made(seed: int) -> Trainer:
        return Trainer.create(NET, LoraSpec(4, seed=seed), 0)

    alone, shared = ({name: made(seed) for seed, name in enumerate("ab")} for _ in range(2))
    one = sum(part.bytes for part in ManagedState(alone["a"], "job", "a").parts())
    one += 1024  # between runs of memory
    manager = StateManager(StateBudgets(one, one, 1 << 26), tmp_path)
    tier = DeviceTier(manager, "w", one)
    manager.attach("w", tier)
    for name, trainer in shared.items():
        state = ManagedState(trainer, "job", name)
        tier.add(name, state.parts(), state, warm=False)
        with tier.use(name, timeout_s=30.0):
            pass
    for step in range(4):
        for name in "ab":
            with tier.use(name, timeout_s=30.0):
                assert operate(shared[name], step) == operate(alone[name], step)
    tier.close()
    manager.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LoraSpec(4)], ids=["full", "lora"])
def test_two_trainers_that_take_turns_learn_what_they_learn_alone(
    node: tuple[StateManager, DeviceTier], lora: LoraSpec | None, dtype: str
) -> None:
    _, tier = node
    alone = {name: Trainer.create(NET, lora, seed, dtype) for seed, name in enumerate("ab")}
    shared = {name: Trainer.create(NET, lora, seed, dtype) for seed, name in enumerate("ab")}
    for name, trainer in shared.items():
        state = ManagedState(trainer, "job", name)
        tier.add(name, state.parts(), state, warm=False)
    for step in range(8):
        for name in "ab":
            with tier.use(name, timeout_s=30.0):
                assert operate(shared[name], step) == operate(alone[name], step)
            if step % 4 == 3:
                tier.evict(name, Tier.DISK)
    for name in "ab":
        with tier.use(name, timeout_s=30.0):
            assert shared[name].meta.optimizer_steps == alone[name].meta.optimizer_steps
            for kind, vector in shared[name].flat.vectors().items():
                if kind in ("weight", "moment1", "moment2", "gradient"):
                    assert torch.equal(vector, alone[name].flat.vectors()[kind])
