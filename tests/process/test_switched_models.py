"""Trainer workers under the node's state manager: models that take turns on a device for one of them learn what they learn alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tinker
from tinker import types

from slackwater.nets.lora import LoraSpec
from slackwater.training.managed_state import ManagedState
from slackwater.training.trainer import Trainer

from .service_process import ServiceProcess

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

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
    """Two models in turn, three steps each; the gradient of one is left over while the other steps."""
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


def test_models_that_take_turns_on_the_device_learn_as_without_a_manager(
    new_service: Callable[..., ServiceProcess], tiny_model: Path
) -> None:
    plain = new_service()
    plain.start()
    expected = losses(plain)
    plain.stop()

    parts = ManagedState(Trainer.create(tiny_model, LoraSpec(4)), "j", "m").parts()
    one = sum(part.bytes for part in parts) / (1 << 20)
    budgets = {"device_mb": 1.5 * one, "host_mb": 4.5 * one}
    managed = new_service(*(w for k, v in budgets.items() for w in ("--set", f"residency.{k}={v}")))
    managed.start()
    assert losses(managed) == expected

    # A trainer that dies leaves the state that it had offloaded, and the next one goes on from there.
    assert losses(managed, kill_before=2) == expected
    logs = "".join(path.read_text() for path in (managed.state / "logs").glob("trainer*.log"))
    assert "outlived its trainer" in logs

    # A model that is larger than the device is refused with the numbers, and the others go on.
    sdk = tinker.ServiceClient(base_url=managed.url, api_key=managed.key)
    with pytest.raises(tinker.TinkerError, match="bytes on the device"):
        sdk.create_lora_training_client(base_model="tiny", rank=64, seed=9)
    assert losses(managed) == expected
