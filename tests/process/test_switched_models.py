"""Trainer workers under the node's state manager: models that take turns on a device for one of
them learn what they learn alone.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import tinker
from tinker import types

from harness.ports import free_port
from slackwater.nets.lora import LoraSpec
from slackwater.training.managed_state import ManagedState
from slackwater.training.trainer import Trainer

from .service_process import ServiceProcess, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

TEXT = [3 + ord(letter) for letter in "the tide turns"]


def example(shift: int) -> types.Datum:
    tokens = [3 + (token + shift) % 200 for token in TEXT]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(
                data=tokens[1:], dtype="int64", shape=[len(tokens) - 1]
            ),
            "weights": types.TensorData(
                data=[1.0] * (len(tokens) - 1), dtype="float32", shape=[len(tokens) - 1]
            ),
        },
    )


def losses(service: ServiceProcess, *, kill_before: int | None = None) -> list[float]:
    """Two models in turn, three steps each; the gradient of one is left over while the
    other steps.
    """
    sdk = tinker.ServiceClient(base_url=service.url, api_key=service.key)
    clients = [sdk.create_lora_training_client(base_model="tiny", rank=4, seed=n) for n in range(2)]
    found = []
    for step in range(3):
        if step == kill_before:
            service.kill_worker("trainer")
        for number, client in enumerate(clients):
            output = client.forward_backward([example(number + step)], "cross_entropy").result()
            found.append(output.metrics["loss:sum"])
        for client in clients:
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return found


@pytest.fixture(scope="module")
def managed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A device for one model, host memory for the base and not for all adapters over it."""
    parts = ManagedState(Trainer.create(tiny_model, LoraSpec(4)), "j", "m").parts()
    one = sum(part.bytes for part in parts) / (1 << 20)
    budgets = {"device_mb": 1.5 * one, "host_mb": 1.3 * one, "disk_mb": 9 * one}
    options = [word for k, v in budgets.items() for word in ("--set", f"residency.{k}={v}")]
    options += ["--set", "coschedule.placement=group"]
    folder = tmp_path_factory.mktemp("managed")
    service = ServiceProcess(folder / "state", tiny_model, free_port(), *options)
    service.start()
    yield service
    assert service.stop() == 0


def test_models_that_take_turns_on_the_device_learn_as_without_a_manager(
    service: ServiceProcess, managed: ServiceProcess
) -> None:
    expected = losses(service)
    assert losses(managed) == expected

    # A trainer that dies leaves the state that it had offloaded, and the next one goes on from
    # there.
    assert losses(managed, kill_before=2) == expected
    logs = "".join(path.read_text() for path in (managed.state / "logs").glob("trainer*.log"))
    assert "outlived its trainer" in logs

    # A model that is larger than the device is refused with the numbers, and the others go on.
    sdk = tinker.ServiceClient(base_url=managed.url, api_key=managed.key)
    with pytest.raises(tinker.TinkerError, match="bytes on the device"):
        sdk.create_lora_training_client(base_model="tiny", rank=64, seed=9)
    assert losses(managed) == expected


class Job:
    """A client of a submitted job; it publishes at the end of each step, as a job does whose next
    rollout is to begin at once.
    """

    def __init__(self, service: ServiceProcess, name: str, seed: int) -> None:
        terms = {"iterations": 50, "slo": 100.0, "profile": {"rollout_s": 20.0, "train_s": 20.0}}
        answer = service.post("/slackwater/jobs", {"name": name, **terms})
        assert answer.json()["stage"] == "placed", answer.text
        sdk = tinker.ServiceClient(
            base_url=service.url, api_key=service.key, user_metadata={"slackwater_job": name}
        )
        self._client = sdk.create_lora_training_client(base_model="tiny", rank=4, seed=seed)
        self._sampler = self._client.save_weights_and_get_sampling_client()

    def roll_out(self) -> None:
        prompt = types.ModelInput.from_ints(TEXT)
        self._sampler.sample(prompt, 1, types.SamplingParams(max_tokens=2, seed=1)).result()

    def train(self) -> None:
        self._client.forward_backward([example(0)], "cross_entropy").result()
        self._client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        self._sampler = self._client.save_weights_and_get_sampling_client()


def counted(service: ServiceProcess) -> dict[str, float]:
    """What the node's state manager has counted by now. Its agent sends the counts with
    heartbeats: one that has come since may be older than what was done before it was asked for,
    the one after it is not.
    """

    def node() -> dict[str, Any]:
        (row,) = service.get("/slackwater/nodes").json()["nodes"]
        return cast("dict[str, Any]", row)

    heard = node()["heartbeats"]
    wait_for("two heartbeats of the agent", lambda: node()["heartbeats"] >= heard + 2)
    return cast("dict[str, float]", node()["states"])


def test_a_jobs_state_is_on_the_device_before_its_first_pass(managed: ServiceProcess) -> None:
    """While a job rolls out its state is brought up in the other's place, and its operations wait
    for nothing.
    """
    jobs = [Job(managed, name, seed) for seed, name in enumerate(("left", "right"))]
    for job in jobs:
        job.roll_out()
        job.train()
    before = counted(managed)
    jobs[0].roll_out()
    wait_for("the load", lambda: counted(managed)["early"] > before["early"])
    jobs[0].train()
    after = counted(managed)
    assert after["found"] > before["found"]
    assert after["waited"] == before["waited"]
