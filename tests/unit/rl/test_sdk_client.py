"""A block with the SDK's client ends, whatever the client's own end waits for."""

import subprocess
import sys
from concurrent.futures import Future
from typing import Any

import pytest

from slackwater.rl.sdk_client import closing


class Client:
    """Closes as the SDK's does; with a heartbeat that beats on, its future never comes."""

    def __init__(self, *, ends: bool) -> None:
        self.told: list[str] = []
        self._ends = ends

    def close(self, status: str) -> "Future[None]":
        self.told.append(status)
        future: Future[None] = Future()
        if self._ends:
            future.set_result(None)
        return future


@pytest.mark.parametrize("ends", [True, False])
def test_the_block_ends_though_the_clients_own_end_never_comes(ends: bool) -> None:
    client = Client(ends=ends)
    service: Any = client
    with closing(service, 0.01) as same:
        assert same is service
    assert client.told == ["success"]


@pytest.mark.parametrize(
    ("raised", "status"), [(ValueError("a"), "errored"), (KeyboardInterrupt(), "interrupted")]
)
def test_what_ended_the_block_is_said_and_goes_on(raised: BaseException, status: str) -> None:
    client: Any = Client(ends=False)
    with pytest.raises(type(raised)), closing(client, 0.01):
        raise raised
    assert client.told == [status]


_WITH_A_LOOP = """
import asyncio
from tinker.lib.internal_client_holder import _internal_client_holder_thread_singleton as held
from slackwater.rl.sdk_client import end_loop

async def request():
    await asyncio.sleep(1000)


loop = held.get_loop()
asyncio.run_coroutine_threadsafe(request(), loop)
assert held._thread.is_alive()
end_loop()
print(held._thread.is_alive(), len(asyncio.all_tasks(loop)))
"""


def test_the_loop_that_the_sdk_runs_in_a_thread_ends_before_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITH_A_LOOP], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "0"]  # requests end before it, not after
    assert done.stderr == ""


_A_DRIVER = """
import sys
from slackwater.rl.sdk_client import load_sdk

load_sdk()
import slackwater.rl.grpo, slackwater.rl.supervised, slackwater.zoo.tiny, tinker
print("torch" in sys.modules, any(name.startswith("torch.") for name in sys.modules))
datum = tinker.Datum(
    model_input=tinker.ModelInput.from_ints([1]),
    loss_fn_inputs={"weights": tinker.TensorData(data=[1.0], dtype="float32")},
)
import torch
print(datum.loss_fn_inputs["weights"].to_numpy().tolist(), torch.ones(1).tolist())
"""


def test_a_driver_loads_no_pytorch_and_its_environment_may() -> None:
    command = [sys.executable, "-c", _A_DRIVER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.stdout.splitlines(), done.stderr) == (["False False", "[1.0] [1.0]"], "")
