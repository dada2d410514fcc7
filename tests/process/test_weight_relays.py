"""Whole weights over the nodes' relays: to a site once, as deltas, from a neighbour; and the same
run when relays are killed.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from tinker import types

from harness.ports import free_port

from .service_process import ServiceProcess, wait_for
from .test_serve_faults import Run, take_step

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

STEPS = 4
FLEET = """
launcher = "local"
[[pools]]
name = "train"
engines = 0
trainers = 1
[[pools]]
name = "rollout"
engines = 1
"""


def fleet_file(folder: Path, rollout_nodes: str) -> Path:
    """A node that trains, and others of another site by letters; each with a directory of
    its own.
    """
    listed = [
        f'[[nodes]]\nname = "{name}"\npool = "{pool}"\nsite = "{pool}"\n'
        f'directory = "{folder / name}"\n'
        for name, pool in (("t", "train"), *((letter, "rollout") for letter in rollout_nodes))
    ]
    file = folder / "fleet.toml"
    file.write_text(FLEET + "".join(listed))
    return file


def train(service: ServiceProcess, at_step: Callable[[int], None] = lambda step: None) -> Run:
    """Whole weights are trained: every step publishes a version that every engine samples from."""
    client = tinker.ServiceClient(base_url=service.url, api_key=service.key)
    trainer = client.create_lora_training_client(base_model="tiny", rank=0, seed=3)
    run = Run()
    for step in range(STEPS):
        sampler = trainer.save_weights_and_get_sampling_client()
        at_step(step)
        params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=step)
        take_step(run, trainer, sampler, params, answers=3, learning_rate=1e-4)
    return run


def rows(service: ServiceProcess) -> dict[str, dict[str, Any]]:
    """Nodes that are here with their worker joined."""
    workers: dict[str, list[str]] = service.get("/slackwater/status").json()["workers"]
    joined = {worker for names in workers.values() for worker in names}
    found = service.get("/slackwater/nodes").json()["nodes"]
    return {row["node"]: row for row in found if joined & set(row["workers"])}


def kill_node(service: ServiceProcess, node: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(rows(service)[node]["agent_pid"], signal.SIGKILL)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from slackwater.zoo.tiny import make_model

    directory = tmp_path_factory.mktemp("models") / "small"
    make_model("small", directory, 0)
    return directory


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("relays")
    file = fleet_file(folder, "ab")
    service = ServiceProcess(folder / "state", model, free_port(), "--fleet", str(file))
    service.start()
    wait_for("all nodes", lambda: len(rows(service)) == 3, 240)
    yield service
    assert service.stop() == 0


@pytest.fixture(scope="module")
def undisturbed(fleet: ServiceProcess) -> Run:
    return train(fleet)


def test_versions_come_by_relay_as_deltas_and_to_a_site_once(
    fleet: ServiceProcess, undisturbed: Run
) -> None:
    assert len(undisturbed.losses) == STEPS
    gauges = fleet.status()["gauges"]
    assert gauges["weights_pulls_by_relay"] >= STEPS
    assert gauges["weights_pulls_by_delta"] >= STEPS - 2
    crossed, brought = (gauges[f"weights_payloads_{how}"] for how in ("over_slow_links", "brought"))
    assert 0 < crossed <= brought
    # Each version's way into the rollout site is crossed at most by a whole and by a delta.
    assert crossed <= 2 * STEPS


def test_one_machine_without_a_fleet_file_makes_the_same_run_and_needs_no_relay(
    model: Path, undisturbed: Run, tmp_path: Path
) -> None:
    service = ServiceProcess(tmp_path / "state", model, free_port())
    service.start()
    try:
        service.wait_for_workers()
        run = train(service)
        assert service.status()["gauges"]["weights_pulls_by_relay"] == 0
    finally:
        service.stop()
    assert (run.tokens, run.losses) == (undisturbed.tokens, undisturbed.losses)


def test_a_source_or_a_neighbour_that_is_killed_while_versions_are_pulled_changes_nothing(
    fleet: ServiceProcess, undisturbed: Run
) -> None:
    def disturb(step: int) -> None:
        if step in (1, 3):
            wait_for("all nodes", lambda: len(rows(fleet)) == 3, 240)
            kill_node(fleet, "t" if step == 1 else "a")

    run = train(fleet, disturb)
    assert (run.tokens, run.losses) == (undisturbed.tokens, undisturbed.losses)
