"""What the ranks of a trainer compute in tests and benchmarks, and one rank for comparison."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from slackwater.model.adam import Adam
from slackwater.nets.config import NetConfig
from slackwater.nets.lora import LoraSpec
from slackwater.nets.ranks import RankPlan, Ranks
from slackwater.training.datum import Datum
from slackwater.training.trainer import Trainer
from slackwater.weights.plan.layout import Layout

NET = NetConfig(
    family="qwen3",
    qk_norm=True,
    qkv_bias=True,
    o_bias=True,
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    ffn_size=48,
    max_positions=64,
    init_std=0.1,
)
LORA = LoraSpec(4, seed=5)
KINDS = {"full": None, "lora": LORA}
# With the service's own eps of 1e-12 the sign of a gradient of almost zero is a step of the whole
# rate.
ADAM = Adam(learning_rate=1e-3, eps=1e-8, grad_clip_norm=0.5, weight_decay=0.01)


def group(rng: np.random.Generator, samples: int, *, teaches: bool = True) -> list[Datum]:
    """Samples of one prompt; those of equal rewards have advantages of zero."""
    prompt = rng.integers(0, NET.vocab_size, int(rng.integers(3, 12)))
    found = []
    for _ in range(samples):
        own = rng.integers(0, NET.vocab_size, int(rng.integers(1, 20)))
        tokens = np.concatenate([prompt, own])
        size = len(tokens)
        advantages = rng.normal(size=size) * teaches
        advantages[: len(prompt)] = 0
        inputs = {
            "target_tokens": np.roll(tokens, -1),
            "logprobs": (-4 + 0.1 * rng.normal(size=size)).astype(np.float32),
            "advantages": advantages.astype(np.float32),
        }
        found.append(Datum(tokens, inputs))
    return found


def batch(step: int, part: int = 0) -> list[Datum]:
    rng = np.random.default_rng([step, part])
    found = [each for size in (4, 1, 3) for each in group(rng, size)]
    return found + group(rng, 2, teaches=False)


def run_steps(trainer: Trainer, steps: range) -> Iterator[Sequence[npt.NDArray[np.float32]]]:
    """Each step's log-probs; the second of three accumulates two passes."""
    for step in steps:
        for part in range(2 if step % 3 == 1 else 1):
            output = trainer.forward_backward(batch(step, part), "importance_sampling", {})
        trainer.optim_step(ADAM)
        yield output.logprobs


def create(kind: str, ranks: Ranks | None = None) -> Trainer:
    return Trainer.create(NET, KINDS[kind], seed=3, ranks=ranks)


def train(plan: RankPlan, *, layouts: Sequence[str], steps: int, folder: str) -> None:
    """For every layout: train all kinds, save half way and at the end (`LAYOUT/KIND/half|end`), go
    on from half way once more (`again`), and save what the layout before it left (`taken`).
    """
    for number, layout in enumerate(layouts):
        parsed = Layout.parse(layout)
        rendezvous = f"{plan.rendezvous}-{layout}"
        ranks = Ranks.join(dataclasses.replace(plan, layout=parsed, rendezvous=rendezvous))
        for kind in KINDS:
            out = Path(folder) / layout / kind
            trainer = create(kind, ranks)
            list(run_steps(trainer, range(steps // 2)))
            trainer.save(out / "half")
            logprobs = list(run_steps(trainer, range(steps // 2, steps)))[-1]
            trainer.save(out / "end")
            again = Trainer.load(out / "half", ranks=ranks)
            list(run_steps(again, range(steps // 2, steps)))
            again.save(out / "again")
            if number:
                before = Path(folder) / layouts[number - 1] / kind / "end"
                Trainer.load(before, ranks=ranks).save(out / "taken")
            if ranks.leads:
                np.savez(out / "logprobs.npz", *logprobs)
        dist.destroy_process_group()


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """A state's weights and moments, whole, whatever layout saved it."""
    flat = Trainer.load(directory).flat
    parts = {"weight": flat.master, "moment1": flat.moment1, "moment2": flat.moment2}
    return {
        f"{part}.{name}": tensor.clone()
        for part, vector in parts.items()
        for name, tensor in flat.views_by_name(vector).items()
    }


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
