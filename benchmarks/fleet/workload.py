"""What a fleet is given to do: many turns at once, and a small reinforcement-learning run. Seeds
make both repeatable.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

_TIMEOUT_S = 600.0
_PROMPTS = (b"one plus two is", b"three plus four is", b"the sea is")


@dataclass(slots=True)
class Answers:
    """Tokens and log-probs of every turn, losses of every step."""

    turns: dict[int, tuple[list[int], list[float]]] = field(default_factory=dict)
    samples: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def different(self, other: "Answers") -> int:
        """How many turns, samples and losses are not the same to the bit."""
        numbers = {*self.turns, *other.turns}
        turns = sum(int(self.turns.get(n) != other.turns.get(n)) for n in numbers)
        samples = _unequal(self.samples, other.samples)
        return turns + samples + _unequal(self.losses, other.losses)


def _unequal(mine: list[Any], others: list[Any]) -> int:
    longer = abs(len(mine) - len(others))
    return longer + sum(int(a != b) for a, b in zip(mine, others, strict=False))


def generate(
    url: str, key: str, answers: Answers, turns: int, tokens: int, done: Callable[[int], None]
) -> None:
    """All turns at once; `done` hears how many have ended."""
    limits = httpx.Limits(max_connections=turns)
    with (
        httpx.Client(base_url=url, timeout=_TIMEOUT_S, limits=limits) as client,
        ThreadPoolExecutor(turns) as pool,
    ):

        def one(number: int) -> None:
            body = {
                "model": "tiny",
                "prompt": [65 + number % 26, 66, 67, 68 + number // 26],
                "max_tokens": tokens,
                "seed": number,
                "logprobs": 1,
                "return_token_ids": True,
            }
            answer = client.post("/v1/completions", json=body, headers={"x-api-key": key})
            answer.raise_for_status()
            choice = answer.json()["choices"][0]
            answers.turns[number] = (choice["token_ids"], choice["logprobs"]["token_logprobs"])
            done(len(answers.turns))

        for _ in pool.map(one, range(turns)):
            pass


def train(url: str, key: str, answers: Answers, steps: int, at_step: Callable[[int], None]) -> None:
    """A policy-gradient run through the public SDK: sample, reward small bytes, take a step."""
    import tinker

    from slackwater.rl.sdk_client import closing

    with closing(tinker.ServiceClient(base_url=url, api_key=key)) as client:
        _train(client, answers, steps, at_step)


def _train(client: Any, answers: Answers, steps: int, at_step: Callable[[int], None]) -> None:
    from tinker import types

    trainer = client.create_lora_training_client(base_model="tiny", rank=4)
    for step in range(steps):
        at_step(step)
        sampler = trainer.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=12, temperature=1.0)
        futures = [
            sampler.sample(types.ModelInput.from_ints(list(prompt)), 2, params)
            for prompt in _PROMPTS
        ]
        data = []
        for prompt, future in zip(_PROMPTS, futures, strict=True):
            for sequence in future.result(timeout=_TIMEOUT_S).sequences:
                tokens = list(sequence.tokens)
                answers.samples.append(tokens)
                reward = sum(token < 128 for token in tokens) / len(tokens) - 0.5
                data.append(datum(list(prompt), tokens, list(sequence.logprobs or ()), reward))
        passed = trainer.forward_backward(data, "importance_sampling")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
        answers.losses.append(passed.result(timeout=_TIMEOUT_S).metrics["loss:sum"])
        stepped.result(timeout=_TIMEOUT_S)


def datum(prompt: list[int], tokens: list[int], logprobs: list[float], reward: float) -> Any:
    """One policy-gradient example: only the sampled tokens count."""
    from tinker import types

    whole = prompt + tokens
    before = [0.0] * (len(prompt) - 1)
    shape = [len(whole) - 1]

    def floats(values: list[float]) -> Any:
        return types.TensorData(data=before + values, dtype="float32", shape=shape)

    return types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=whole[1:], dtype="int64", shape=shape),
            "logprobs": floats(logprobs),
            "advantages": floats([reward] * len(tokens)),
        },
    )
