"""A server on a trainer's devices sleeps before the trainer gets them, and wakes as it was: the
real controller, adapter and protocol, against SGLang's recorded contract.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from harness.live_fleet import BASE, BASE_VERSION, JOB
from harness.ports import free_port
from harness.rollout_floor import RolloutFloor
from harness.server_bench import PROMPT, ServerBench, turn, until
from harness.sglang_server import SglangContract, continued, fingerprint
from slackwater.control.devices.messages import GrantDevices
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.control.steps import events as on
from slackwater.model.ids import InstanceId, WorkerId
from slackwater.model.sampling import Sampling
from slackwater.runtime.live_driver import loop_time
from slackwater.zoo.tiny import make_model

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]
TRAINER = WorkerId("trainer")
SETTINGS = RolloutSettings(trainer_patience_s=0.2, watch_every_s=0.05)


class Devices:
    """A trainer that asks for the devices; `asleep_at_grant` is what the server did by then."""

    def __init__(self, floor: RolloutFloor, server: SglangContract) -> None:
        self._floor, self._server = floor, server
        self.asleep_at_grant: list[bool] = []
        floor.runtime.register(self._granted, (GrantDevices,))

    def _granted(self, _: GrantDevices) -> None:
        self.asleep_at_grant.append(self._server.asleep)

    async def train(self) -> None:
        before = len(self.asleep_at_grant)
        self._floor.runtime.feed(on.DevicesWanted(loop_time(), TRAINER))
        self._floor.runtime.feed(on.DevicesAsked(loop_time(), TRAINER, JOB))
        await until(lambda: len(self.asleep_at_grant) > before)
        assert self._server.asleep
        self._floor.runtime.feed(on.DevicesReturned(loop_time(), TRAINER, 0.1, True))


Scenario = Callable[[ServerBench, SglangContract, Devices], Awaitable[None]]


def run(folder: Path, scenario: Scenario) -> None:
    async def main() -> None:
        server = SglangContract(folder / "model")
        async with (
            asyncio.timeout(300),
            RolloutFloor(SETTINGS) as floor,
            server.serving(free_port()),
        ):
            bench = ServerBench(floor, folder)
            try:
                options = ("--engine", "sglang", "--url", server.url, "--kind", "local")
                await bench.start("s", "engine_server.adapter", *options)
                await floor.until_joined(1)
                floor.rollout.publish(BASE_VERSION, BASE)
                await scenario(bench, server, Devices(floor, server))
            finally:
                await bench.stop()

    make_model("tiny", folder / "model", seed=0)
    asyncio.run(main())


def test_a_server_sleeps_before_a_trainer_gets_its_devices_and_wakes_with_its_weights(
    tmp_path: Path,
) -> None:
    async def scenario(bench: ServerBench, server: SglangContract, devices: Devices) -> None:
        await until(lambda: server.asleep)  # it came up awake, and nobody wants it
        base, versions = fingerprint(bench.model), {BASE_VERSION: fingerprint(bench.model)}
        # Beside the loop, which answers the adapter's questions for the server's health.
        folder = await asyncio.to_thread(bench.publish_adapter, "a", seed=1)
        bench.floor.rollout.publish("a", BASE, adapter=True)
        versions["a"] = fingerprint(folder)
        for number in range(3):
            for version, weights in versions.items():
                spec = turn(f"{version}-{number}", Sampling(6, seed=number), version=version)
                answer = await bench.floor.generate(spec)
                adapter = "" if version == BASE_VERSION else weights
                assert list(answer.tokens) == continued(base, adapter, number, PROMPT, 6)
            await devices.train()
        assert devices.asleep_at_grant == [True] * 3
        assert server.calls.count("release") == server.calls.count("resume") + 1 >= 4

    run(tmp_path, scenario)


def test_a_server_that_does_not_sleep_is_given_up_and_its_loss_frees_the_devices(
    tmp_path: Path,
) -> None:
    async def scenario(bench: ServerBench, server: SglangContract, devices: Devices) -> None:
        await until(lambda: server.asleep)
        await bench.floor.generate(turn("t", Sampling(2)))
        server.refuses_to_sleep = True
        trained = asyncio.create_task(devices.train())
        await until(lambda: bool(bench.floor.lost))
        await until(lambda: len(devices.asleep_at_grant) == 1)
        trained.cancel()
        assert not bench.floor.controller.steps.is_local(InstanceId("s"))

    run(tmp_path, scenario)
