"""SIGKILL of the service, a trainer or an engine in the middle of a run changes nothing in its
result.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from harness.ports import free_port
from slackwater.control.controller import Controller
from slackwater.control.fleet.messages import EVENT_TYPES
from slackwater.control.record import replay
from slackwater.model.config import decode
from slackwater.model.toml_text import read_toml
from slackwater.runtime.fleet_controller import new_fleet_controller
from slackwater.runtime.settings import ServiceSettings

from .cookbook import MODEL_NAME, Workspace
from .service_process import ServiceProcess, wait_for

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


def take_step(
    run: Run,
    trainer: tinker.TrainingClient,
    sampler: tinker.SamplingClient,
    params: types.SamplingParams,
    *,
    answers: int,
    learning_rate: float,
) -> None:
    """Sample, reward small bytes, change the weights; what was seen goes into `run`."""
    futures = [
        sampler.sample(types.ModelInput.from_ints(list(prompt)), answers, params)
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
    stepped = trainer.optim_step(types.AdamParams(learning_rate=learning_rate))
    run.losses.append(passed.result(timeout=240).metrics["loss:sum"])
    stepped.result(timeout=240)


def train(service: ServiceProcess, at_step: Callable[[int], None], base: str = "tiny") -> Run:
    """Sample, reward small bytes, take a step; `STEPS` times. No seed is given anywhere."""
    client = tinker.ServiceClient(base_url=service.url, api_key=service.key)
    trainer = client.create_lora_training_client(base_model=base, rank=4)
    run = Run()
    for step in range(STEPS):
        at_step(step)
        sampler = trainer.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=12, temperature=1.0)
        take_step(run, trainer, sampler, params, answers=2, learning_rate=1e-2)
    return run


@pytest.fixture(scope="module")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """One that is killed and started again; the recipe knows the model by a name of the
    cookbook's.
    """
    folder = tmp_path_factory.mktemp("faults")
    record = ("--record", str(folder / "record"))
    killed = ServiceProcess(folder / "state", tiny_model, free_port(), *record, name=MODEL_NAME)
    killed.start()
    killed.wait_for_workers()
    yield killed
    killed.stop()


def kills_of(service: ServiceProcess) -> list[Callable[[], object]]:
    """SIGKILL of each kind of process, in random order."""

    def kill_service() -> None:
        service.kill()
        service.start()

    kills: list[Callable[[], object]] = [
        lambda: service.kill_worker("trainer"),
        lambda: service.kill_worker("engine"),
        kill_service,
    ]
    random.shuffle(kills)
    return kills


@pytest.mark.timeout(900)
def test_a_run_disturbed_by_kills_equals_an_undisturbed_one(service: ServiceProcess) -> None:
    expected = train(service, lambda step: None, MODEL_NAME)
    assert len(set(expected.losses)) > STEPS // 2  # it did train
    kills = kills_of(service)
    steps = dict(zip(random.sample(range(STEPS), len(kills)), kills, strict=True))
    killers: list[threading.Timer] = []

    def kill_soon(step: int) -> None:
        """At a random moment of the step, while requests of it are under way."""
        if step in steps:
            killers.append(threading.Timer(random.uniform(0.0, 0.4), steps[step]))
            killers[-1].start()

    disturbed = train(service, kill_soon, MODEL_NAME)
    for killer in killers:
        killer.join(240)
    assert len(killers) == len(kills)
    assert disturbed.tokens == expected.tokens, f"killed at {sorted(steps)}"
    assert disturbed.losses == expected.losses, f"killed at {sorted(steps)}"


RECIPE = {
    "env": "arithmetic",
    "model_name": MODEL_NAME,
    "renderer_name": "role_colon",
    "lora_rank": 32,
    "groups_per_batch": 4,
    "group_size": 4,
    "learning_rate": 1e-3,
    "max_tokens": 16,
    "max_steps": 6,
    "eval_every": 0,
    "save_every": 3,
    "behavior_if_log_dir_exists": "delete",
}


@pytest.mark.timeout(900)
def test_a_cookbook_recipe_disturbed_by_kills_has_the_curve_of_an_undisturbed_one(
    service: ServiceProcess, tiny_model: Path, tmp_path: Path
) -> None:
    made = Workspace.make(tmp_path / "work", tiny_model, service.url, service.key)
    with closing(made) as workspace:
        settings = RECIPE | {"load_checkpoint_path": warmed_up(service)}
        expected = workspace.run("math_rl.train", "calm", within_s=300, **settings)
        assert sum(row["grad_norm"] > 0 for row in expected) > 2  # it did train
        rows = tmp_path / "work" / "rough" / "metrics.jsonl"
        with workspace.running("math_rl.train", "rough", **settings) as recipe:
            for step, kill in enumerate(kills_of(service), start=1):
                wait_for("a step", partial(has_rows, rows, step))
                time.sleep(random.uniform(0.0, 0.5))
                kill()
            assert recipe.wait(300) == 0, workspace.tail("rough")
        assert curve(workspace.metrics("rough")) == curve(expected)
        assert len(expected) == RECIPE["max_steps"]


def warmed_up(service: ServiceProcess) -> str:
    """The path of a model that answers with numbers, some of them in the form that is rewarded."""
    client = tinker.ServiceClient(base_url=service.url, api_key=service.key)
    trainer = client.create_lora_training_client(base_model=MODEL_NAME, rank=32)
    numbers = random.Random(0)
    for _ in range(90):
        pairs = [(numbers.randrange(101), numbers.randrange(101)) for _ in range(8)]
        trainer.forward_backward([answered(x, y) for x, y in pairs], "cross_entropy")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=5e-3))
    stepped.result(timeout=240)
    return trainer.save_state("warm").result(timeout=240).path


def answered(x: int, y: int) -> types.Datum:
    """A question as the recipe asks it, with its answer to learn."""
    question = f"User: What is 4 + 5?\n\nAssistant: 9\n\nUser: What is {x} + {y}?\n\nAssistant:"
    answer = f" {x + y}\n\nUser:"
    tokens = list(f"{question}{answer}".encode())
    weights = [0.0] * (len(question) - 1) + [1.0] * len(answer)
    count = len(tokens) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[count]),
            "weights": types.TensorData(data=weights, dtype="float32", shape=[count]),
        },
    )


def has_rows(file: Path, count: int) -> bool:
    return file.exists() and file.read_text().count("\n") >= count


def curve(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """All that was measured, except how long it took."""
    return [{key: value for key, value in row.items() if "time" not in key} for row in rows]


def test_what_the_live_controllers_saw_makes_fresh_ones_decide_the_same(
    service: ServiceProcess,
) -> None:
    """The record of the service's last life, which began with a kill."""
    assert service.stop() == 0
    assert "Traceback" not in (service.state / "up.log").read_text()
    record = service.state.parent
    settings = decode(ServiceSettings, read_toml("config", service.state / "config.toml"))
    replays(record / "record.fleet.jsonl", new_fleet_controller(settings), EVENT_TYPES)


def replays(record: Path, controller: Controller[Any, Any], types: dict[str, type]) -> None:
    with record.open("rb") as lines:
        agreed, divergence = replay(controller, lines, types)
    assert divergence is None
    assert agreed > 3
