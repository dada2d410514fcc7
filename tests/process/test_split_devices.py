"""The devices of a step are split: a local engine leaves the rest of the rollout to another engine,
and its devices train on what is complete. That changes neither tokens nor losses, whoever is
killed.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tinker
from typer.testing import CliRunner

from harness.ports import free_port
from slackwater.cli import instance as instance_command
from slackwater.control.record import read_entry
from slackwater.model.operation import OpKind
from slackwater.rl.environments import arithmetic
from slackwater.rl.grpo import run
from slackwater.rl.recipe import load_recipe
from slackwater.rl.rollout import Rollout, TrajectoryGroup
from slackwater.rl.run_directory import RunDirectory

from .service_process import ServiceProcess, wait_for
from .test_rollout_service import instances

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

STEPS = 3
RECIPE = (
    *(f"grpo.steps={STEPS}", "grpo.groups=8", "grpo.max_groups=8", "grpo.group_size=4"),
    *("grpo.overlap=4", "grpo.in_order=true", "grpo.dynamic_sampling=false"),
    *("warm_up.steps=0", "sampling.max_tokens=400"),  # a model from nothing ends at random
)
FORWARD_BACKWARD = OpKind.FORWARD_BACKWARD.value
AFTER_S, AT_ONCE_S = 600.0, 0.0  # how long the trainer waits for the devices
LOSSES = ("optim/loss", "optim/grad_norm", "optim/sampler_kl", "optim/passes", "reward")


@dataclass
class Run:
    """What a run sampled and trained, and the messages of the service meanwhile."""

    tokens: list[dict[int, list[list[int]]]] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    record: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def service_with(patience_s: float, model: Path, folder: Path) -> Iterator[ServiceProcess]:
    """One engine of its own, and one that shares the trainer's devices."""
    config = folder / "service.toml"
    folder.mkdir(exist_ok=True)
    rule = 'seeding = { name = "adaptive_window", initial_s = 1e6 }'
    patience = f"trainer_patience_s = {patience_s}"
    config.write_text(f"max_running = 8\n[rollout]\n{rule}\n{patience}\n")
    options = ("--engines", "1", "--local-engines", "1", "--config", str(config))
    state = folder / "state"
    record = ("--record", str(state / "record"))
    service = ServiceProcess(state, model, free_port(), *options, *record)
    service.start()
    try:
        service.wait_for_workers()
        yield service
    finally:
        assert service.stop() == 0
    replayed = ["verify", "--config", str(config), str(state / "record.fleet.jsonl")]
    checked = CliRunner().invoke(instance_command.app, replayed)
    assert checked.exit_code == 0, checked.output


def even_share(answer: str, expected: str) -> float:
    """A reward that random answers differ in."""
    del expected
    return sum(ord(letter) % 2 == 0 for letter in answer) / max(len(answer), 1)


def train(
    service: ServiceProcess,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    at_step: Callable[[int], None] = lambda step: None,
) -> Run:
    found = Run()
    sample = Rollout.iter_groups

    def sampled(self: Rollout, *arguments: Any) -> Iterator[TrajectoryGroup]:
        at_step(len(found.tokens))
        found.tokens.append({})
        for group in sample(self, *arguments):
            found.tokens[-1][group.use.prompt] = [each.tokens for each in group.trajectories]
            yield group

    monkeypatch.setattr(Rollout, "iter_groups", sampled)
    monkeypatch.setattr(arithmetic, "digit_share", even_share)
    client = tinker.ServiceClient(base_url=service.url, api_key=service.key)
    recipe = load_recipe("copy-digits", list(RECIPE))
    directory = RunDirectory(folder / "run", recipe)
    run(
        recipe,
        client,
        directory,
        lambda step, metrics: found.losses.append([metrics.get(name, 0.0) for name in LOSSES]),
    )
    directory.close()
    monkeypatch.undo()
    lines = (service.state / "record.fleet.jsonl").read_bytes().splitlines()
    found.record = [read_entry(line) for line in lines]
    return found


def tokens_beside_training(record: list[dict[str, Any]]) -> int:
    """Tokens that arrived while the trainer ran a forward_backward."""
    trains, tokens = False, 0
    for entry in record:
        event = entry["event"]
        trains = trains and event["type"] not in ("TicketDone", "TicketFailed", "TrainerLost")
        if trains and event["type"] == "TokensArrived":
            tokens += len(event["body"]["tokens"])
        trains = trains or any(
            command["type"] == "RunOp" and command["body"]["operation"]["kind"] == FORWARD_BACKWARD
            for command in entry["commands"]
        )
    return tokens


def splits(record: list[dict[str, Any]]) -> list[str]:
    """Why local engines gave way to the trainer before the last turn, and why they returned."""
    commands = [command for entry in record for command in entry["commands"]]
    kinds = ("EndSeeding", "ResumeSeeding")
    reasons = [command["body"]["reason"] for command in commands if command["type"] in kinds]
    return [reason for reason in reasons if reason != "all turns are done"]


@pytest.fixture(scope="module")
def expected(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run without the split: training begins when the rollout is over."""
    folder = tmp_path_factory.mktemp("after")
    with (
        service_with(AFTER_S, tiny_model, folder) as service,
        pytest.MonkeyPatch.context() as p,
    ):
        found = train(service, folder, p)
    assert len(set(map(tuple, found.losses))) == STEPS  # it did train
    assert [len(step) for step in found.tokens] == [8] * STEPS
    assert not splits(found.record) and not tokens_beside_training(found.record)
    return found


def test_one_engines_devices_train_while_the_other_finishes_the_rollout(
    tiny_model: Path, tmp_path: Path, expected: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service_with(AT_ONCE_S, tiny_model, tmp_path) as service:
        found = train(service, tmp_path, monkeypatch)
    assert found.tokens == expected.tokens
    assert found.losses == expected.losses
    assert "the trainer has waited 0 s" in splits(found.record)
    assert tokens_beside_training(found.record) > 0


def test_sigkill_of_either_engine_changes_neither_tokens_nor_losses(
    tiny_model: Path, tmp_path: Path, expected: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local one while it rolls out, the other while it finishes the rollout."""
    killed: list[str] = []

    def kill(worker: str, local_is: str) -> None:
        wait_for("the step's rollout", lambda: states(service).get("local") == "ready")
        wait_for(f"{worker} to be alone", lambda: states(service).get("local") == local_is)
        service.kill_worker(worker)
        killed.append(worker)

    def at_step(step: int) -> None:
        if step < 2:
            victim = (("local", "ready"), ("engine", "resting"))[step]
            killers.append(threading.Thread(target=kill, args=victim))
            killers[-1].start()

    killers: list[threading.Thread] = []
    with service_with(AT_ONCE_S, tiny_model, tmp_path) as service:
        found = train(service, tmp_path, monkeypatch, at_step)
        for killer in killers:
            killer.join(60)
    assert killed == ["local", "engine"]
    assert found.tokens == expected.tokens
    assert found.losses == expected.losses


def states(service: ServiceProcess) -> dict[str, str]:
    """Of each engine, by the first word of its name."""
    return {name.partition("-")[0]: row["state"] for name, row in instances(service).items()}
