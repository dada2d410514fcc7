"""A model whose job is placed on another node moves there with its state, and learns on as if it
had been there always.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tinker
from tinker import types

from harness.ports import free_port

from .service_process import ServiceProcess, wait_for
from .test_permits import Owner
from .test_switched_models import TEXT, example

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

# A job whose phases take milliseconds shares nodes only where it may be slowed down a lot by one
# whose phases take seconds.
SLO = 1000.0
WAIT_S = 240.0
# The job is placed on the first train node, a model is made by the trainer whose name comes first.
FLEET = """
[[pools]]
name = "rollout"
engines = 1
[[pools]]
name = "train"
engines = 0
trainers = 1
[[nodes]]
name = "r"
pool = "rollout"
[[nodes]]
name = "t-z"
pool = "train"
[[nodes]]
name = "t-a"
pool = "train"
"""


@pytest.fixture
def fleet(tiny_model: Path, tmp_path: Path) -> Iterator[ServiceProcess]:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET)
    options = ("--set", "coschedule.placement=group", "--set", "residency.device_mb=64")
    service = ServiceProcess(
        *(tmp_path / "state", tiny_model, free_port(), "--fleet", str(file), *options)
    )
    service.start()
    wait_for("both trainers", lambda: service.status()["gauges"]["trainers"] == 2)
    yield service
    assert service.stop() == 0


def log_of(service: ServiceProcess, name: str) -> str:
    return "".join(path.read_text() for path in (service.state / "logs").glob(f"*{name}*.log"))


def steps(service: ServiceProcess, job: str, after_two: Callable[[], object]) -> list[float]:
    """Four rollouts and training steps of a model, one after the other."""
    sdk = tinker.ServiceClient(
        base_url=service.url, api_key=service.key, user_metadata={"slackwater_job": job}
    )
    client = sdk.create_lora_training_client(base_model="tiny", rank=4, seed=3)
    prompt = types.ModelInput.from_ints(TEXT)
    found = []
    for step in range(4):
        if step == 2:
            after_two()
        sampler = client.save_weights_and_get_sampling_client()
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2, seed=step)).result(WAIT_S)
        output = client.forward_backward([example(step)], "cross_entropy").result(WAIT_S)
        found.append(output.metrics["loss:sum"])
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result(WAIT_S)
    return found


def test_a_model_moves_to_its_permits_node_with_its_state(fleet: ServiceProcess) -> None:
    # Nobody knows how long its phases take: for two cycles it is a guest where nobody else is, then
    # it shares the other's nodes.
    other = Owner(fleet, "other", slo=SLO)
    other.give_back(other.permit("rollout", 0))
    held = other.permit("train", 0)
    fleet.post("/slackwater/jobs", {"name": "moves", "iterations": 50, "slo": SLO})
    moved = steps(fleet, "moves", lambda: other.give_back(held))
    assert moved == steps(fleet, "stays", lambda: None)
    assert "came from another node" in log_of(fleet, "t-z")
    assert "bytes of its state went to" in log_of(fleet, "t-a")
