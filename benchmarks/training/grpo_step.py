"""One GRPO step of ours, in one process: the engine samples, the trainer learns, the engine gets
the new weights.

The shape of the work is fixed, and the peer's is the same: a random Qwen3 of 2 layers, 4 prompts of
16 bytes, 8 samples each of exactly 32 new tokens, group-normalised advantages, one clipped AdamW
update on all of them.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch

from slackwater.engine.config import EngineConfig
from slackwater.engine.engine import Engine
from slackwater.engine.request import GenerationRequest
from slackwater.model.adam import Adam
from slackwater.model.sampling import Sampling
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net
from slackwater.rl.advantages import Floats, group_advantages, token_advantages
from slackwater.training.datum import Datum
from slackwater.training.trainer import Trainer

FIRST_BYTE = 3  # after <pad>, <bos>, <eos>
DIGITS = range(FIRST_BYTE + ord("0"), FIRST_BYTE + ord("9") + 1)


@dataclass(frozen=True, slots=True)
class StepShape:
    """How much one step samples and trains."""

    prompts: int = 4
    group: int = 8
    prompt_tokens: int = 16
    new_tokens: int = 32

    @property
    def completion_tokens(self) -> int:
        return self.prompts * self.group * self.new_tokens


NET = NetConfig(
    family="qwen3",
    qk_norm=True,
    vocab_size=259,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=256,
    max_positions=512,
    tied=True,
)
ADAM = Adam(learning_rate=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, grad_clip_norm=1.0)


class GrpoStep:
    """Engine and trainer of one model; `run()` makes one step."""

    def __init__(self, shape: StepShape, seed: int, adam: Adam = ADAM) -> None:
        self._shape, self._adam = shape, adam
        self._trainer = Trainer.create(NET, seed=seed)
        net = load_net(NET, seed=seed).requires_grad_(False)
        self._engine = Engine(net, EngineConfig(kv_bytes=64 << 20))
        self._steps = 0

    def weights(self) -> dict[str, torch.Tensor]:
        """The trained weights as they are now."""
        return {name: tensor.clone() for name, tensor in self._trainer.weights().items()}

    def run(self) -> float:
        """Sample, score and learn; returns the mean reward."""
        tokens, logprobs, prompts = self._sample()
        is_digit = (tokens >= DIGITS.start) & (tokens < DIGITS.stop)
        rewards = is_digit.mean(axis=1)
        groups = rewards.reshape(self._shape.prompts, self._shape.group)
        advantages = np.concatenate([group_advantages(group, by_spread=True) for group in groups])
        pushes = token_advantages(advantages.tolist(), list(logprobs), entropy_bonus=0.0)
        data = [
            _datum(prompts[row // self._shape.group], tokens[row], logprobs[row], pushes[row])
            for row in range(len(tokens))
        ]
        self._trainer.forward_backward(data, "ppo", {})
        self._trainer.optim_step(self._adam)
        return float(rewards.mean())

    def _sample(self) -> tuple[np.ndarray, Floats, list[tuple[int, ...]]]:
        shape, engine = self._shape, self._engine
        engine.versions.put("now", self._trainer.weights())
        rows = shape.prompts * shape.group
        prompts = []
        for prompt in range(shape.prompts):
            text = f"{self._steps * shape.prompts + prompt:0{shape.prompt_tokens}d}"
            prompts.append(tuple(FIRST_BYTE + byte for byte in text.encode()))
        for row in range(rows):
            params = Sampling(
                max_tokens=shape.new_tokens, seed=self._steps * rows + row, ignore_eos=True
            )
            engine.add(GenerationRequest(row, prompts[row // shape.group], params, "now"))
        self._steps += 1
        tokens = np.zeros((rows, shape.new_tokens), np.int64)
        logprobs = np.zeros((rows, shape.new_tokens), np.float32)
        done = np.zeros(rows, np.int64)
        while engine.busy:
            step = engine.step()
            ids = step.request_ids
            tokens[ids, done[ids]] = step.tokens
            logprobs[ids, done[ids]] = step.logprobs
            done[ids] += 1
        assert (done == shape.new_tokens).all(), "every request has exactly its tokens"
        return tokens, logprobs, prompts


def _datum(prompt: tuple[int, ...], tokens: np.ndarray, logprobs: Floats, pushes: Floats) -> Datum:
    sequence = np.concatenate([np.asarray(prompt, np.int64), tokens])
    before = np.zeros(len(prompt) - 1, np.float32)
    return Datum(
        sequence[:-1],
        {
            "target_tokens": sequence[1:],
            "logprobs": np.concatenate([before, logprobs]),
            "advantages": np.concatenate([before, pushes]),
        },
    )


def measure(shape: StepShape, steps: int, warm_up: int, seed: int) -> tuple[float, list[float]]:
    """CPU seconds per step, of all threads of this process, and the rewards."""
    torch.set_num_threads(1)
    step = GrpoStep(shape, seed)
    rewards = [step.run() for _ in range(warm_up)]
    began_s = time.process_time()
    rewards += [step.run() for _ in range(steps)]
    return (time.process_time() - began_s) / steps, rewards
