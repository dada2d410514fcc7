"""Reward models behind the broker, live: two that share one device, asked by a client, over the
death of their worker.
"""

import asyncio
import math
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.ports import free_port
from slackwater.model.errors import ConfigError, NotFoundError, RefusedError
from slackwater.rl.actions import ActionClient
from slackwater.zoo.tiny import make_model

from .service_process import ServiceProcess, wait_for

pytestmark = pytest.mark.process
TEXT = list(range(20, 60))


class RewardServiceProcess(ServiceProcess):
    """`slackwater up` with reward services and nothing else."""

    def __init__(self, state: Path, port: int, models: dict[str, Path]) -> None:
        super().__init__(state, state, port)
        config = state.parent / "rewards.toml"
        services = "".join(f'{name} = "{path}"\n' for name, path in models.items())
        # Room for one of them: the other one goes before it comes.
        config.write_text(
            "engines = 0\ntrainers = 0\n"
            f"[rewards]\nkv_mb = 8\ndevice_mib = 12\n[rewards.services]\n{services}"
        )
        self._command = ["up", "--state", str(state), "--port", str(port)]
        self._command += ["--config", str(config)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardServiceProcess]:
    folder = tmp_path_factory.mktemp("rewards")
    models = {name: folder / name for name in ("judge", "teacher")}
    for seed, path in enumerate(models.values()):
        make_model("tiny", path, seed)
    # A corrupt one is staged first: it must not be in the way of the others.
    models = {"broken": folder / "broken", **models}
    shutil.copytree(models["judge"], models["broken"])
    weights = models["broken"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    service = RewardServiceProcess(folder / "state", free_port(), models)
    service.start()
    yield service
    service.stop()


def reward_worker(service: RewardServiceProcess) -> int:
    """The worker's process, once it has come in."""
    wait_for("the reward worker", lambda: "rewards" in service.status()["workers"])
    marker = str(service.state).encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"slackwater.worker.reward_worker" in line and marker in line:
                return int(entry.name)
    raise AssertionError("the reward worker has no process")


def test_services_that_share_a_device_score_each_as_its_own_model(
    service: RewardServiceProcess,
) -> None:
    async def ask() -> None:
        async with ActionClient(service.url, service.key) as client:
            names = ("judge", "teacher") * 3
            found = await asyncio.gather(*(client.score(name, TEXT) for name in names))
            judged, taught = found[0], found[1]
            assert len(judged.logprobs) == len(TEXT) - 1
            assert math.isclose(judged.score, sum(judged.logprobs) / 39, abs_tol=1e-5)
            assert judged.score != taught.score
            assert found == [judged, taught] * 3
            with pytest.raises(NotFoundError, match="'critic' is not a reward service"):
                await client.score("critic", TEXT)
            with pytest.raises(ConfigError, match="tokens"):
                await client.score("judge", [1])

    asyncio.run(ask())


def test_a_corrupt_model_is_refused_with_its_reason_and_no_retry(
    service: RewardServiceProcess,
) -> None:
    async def ask() -> None:
        async with ActionClient(service.url, service.key) as client:
            with pytest.raises(RefusedError, match=r"'broken' failed to load: SafetensorError"):
                await client.score("broken", TEXT)

    reward_worker(service)
    asyncio.run(ask())


def test_a_score_is_had_again_after_its_worker_was_killed(service: RewardServiceProcess) -> None:
    async def ask() -> None:
        async with ActionClient(service.url, service.key) as client:
            before = await client.score("judge", TEXT)
            os.kill(reward_worker(service), signal.SIGKILL)
            assert await client.score("judge", TEXT, retries=2) == before

    asyncio.run(ask())
