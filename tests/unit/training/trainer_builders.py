"""Small nets and data for trainer tests."""

from pathlib import Path

import numpy as np

from slackwater.nets.config import NetConfig
from slackwater.nets.lora import LoraSpec
from slackwater.training.datum import Datum
from slackwater.training.trainer import Trainer

NET = NetConfig(
    family="qwen3",
    qk_norm=True,
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    head_dim=8,
    ffn_size=48,
    max_positions=64,
    init_std=0.1,
)


def trainer(lora: LoraSpec | None = None, dtype: str = "float32", net: NetConfig = NET) -> Trainer:
    return Trainer.create(net, lora, seed=3, dtype=dtype)


def datum(seed: int, length: int, width: int | None = None) -> Datum:
    """Random tokens, targets, weights (some negative), sampler log-probs and advantages."""
    rng = np.random.default_rng(seed)
    shape = (length,) if width is None else (length, width)
    return Datum(
        tokens=rng.integers(0, NET.vocab_size, length),
        inputs={
            "target_tokens": rng.integers(0, NET.vocab_size, shape),
            "weights": rng.normal(size=shape).astype(np.float32),
            "logprobs": (-4 + rng.normal(size=shape)).astype(np.float32),
            "advantages": rng.normal(size=shape).astype(np.float32),
        },
    )


def batch(seed: int = 0) -> list[Datum]:
    return [datum(seed * 100 + i, length) for i, length in enumerate((5, 17, 1, 9, 33, 9))]


def state_bytes(directory: Path) -> bytes:
    return (directory / "trainer.safetensors").read_bytes()
