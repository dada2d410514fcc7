"""SIGKILL of the service, a trainer or an engine in the middle of a run changes nothing in its result."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from slackwater.control.controller import Controller
from slackwater.control.operations import events as operations
from slackwater.control.operations.controller import OperationsController
from slackwater.control.record import replay
from slackwater.control.rollout import events as rollout
from slackwater.control.rollout.manager import RolloutManager
from slackwater.runtime.plane import ROLLOUT_SETTINGS

from .service_process import ServiceProcess

pytestmark = pytest.mark.process

STEPS = 8
PROMPTS = (b"one plus two is", b"three plus four is", b"the sea is")


def example(tokens: list[int], logprobs: list[float], reward: float, prompt: int) -> types.Datum:
    """One policy-gradient example: only the sampled tokens count."""
    targets = tokens[1:]
    padding = [0.0] * (prompt - 1)
    sampled = len(targets) - len(padding)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
            "logprobs": types.TensorData(
                data=padding + logprobs, dtype="float32", shape=[len(targets)]
            ),
            "advantages": types.TensorData(
                data=padding + [reward] * sampled, dtype="float32", shape=[len(targets)]
            ),
        },
    )


@dataclass
class Run:
    """What a small reinforcement-learning run saw."""

    losses: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)


def train(service: ServiceProcess, at_step: Callable[[int], None]) -> Run:
    """Sample, reward small bytes, take a step; `STEPS` times. No seed is given anywhere."""
    client = tinker.ServiceClient(base_url=service.url, api_key=service.key)
    trainer = client.create_lora_training_client(base_model="tiny", rank=4)
    run = Run()
    for step in range(STEPS):
        at_step(step)
        sampler = trainer.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=12, temperature=1.0)
        futures = [
            sampler.sample(types.ModelInput.from_ints(list(prompt)), 2, params)
            for prompt in PROMPTS
        ]
        data = []
        for prompt, future in zip(PROMPTS, futures, strict=True):
            for sequence in future.result(timeout=240).sequences:
                run.tokens.append(list(sequence.tokens))
                reward = sum(token < 128 for token in sequence.tokens) / len(sequence.tokens) - 0.5
                assert sequence.logprobs is not None
                tokens = list(prompt) + list(sequence.tokens)
                data.append(example(tokens, list(sequence.logprobs), reward, len(prompt)))
        passed = trainer.forward_backward(data, "importance_sampling")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
        run.losses.append(passed.result(timeout=240).metrics["loss:sum"])
        stepped.result(timeout=240)
    return run


@pytest.mark.timeout(600)
def test_a_run_disturbed_by_kills_equals_an_undisturbed_one(
    new_service: Callable[..., ServiceProcess], tmp_path: Path
) -> None:
    service = new_service("--record", str(tmp_path / "record"))
    service.start()
    service.wait_for_workers()
    expected = train(service, lambda step: None)
    assert len(set(expected.losses)) == STEPS  # it did train

    def kill_service() -> None:
        service.kill()
        service.start()

    kills: list[Callable[[], object]] = [
        lambda: service.kill_worker("trainer"),
        lambda: service.kill_worker("engine"),
        kill_service,
    ]
    chance = random.Random(time.time_ns())
    steps = dict(zip(chance.sample(range(STEPS), len(kills)), kills, strict=True))
    killers: list[threading.Timer] = []

    def kill_soon(step: int) -> None:
        """At a random moment of the step, while requests of it are under way."""
        if step in steps:
            killers.append(threading.Timer(chance.uniform(0.0, 0.4), steps[step]))
            killers[-1].start()

    disturbed = train(service, kill_soon)
    for killer in killers:
        killer.join(60)
    assert len(killers) == len(kills)
    assert disturbed.tokens == expected.tokens, f"killed at {sorted(steps)}"
    assert disturbed.losses == expected.losses, f"killed at {sorted(steps)}"
    service.stop()
    replays(tmp_path / "record.operations.jsonl", OperationsController(), operations.EVENT_TYPES)
    replays(
        tmp_path / "record.rollout.jsonl", RolloutManager(ROLLOUT_SETTINGS), rollout.EVENT_TYPES
    )


def replays(record: Path, controller: Controller[Any, Any], types: dict[str, type]) -> None:
    """What the live controllers saw since the last start makes a fresh one decide the same."""
    with record.open("rb") as lines:
        agreed, divergence = replay(controller, lines, types)
    assert divergence is None
    assert agreed > 3
