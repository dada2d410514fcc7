"""SIGKILL of the control plane alone: its workers wait for the next one, and turns resume."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from tinker import types

from harness.ports import free_port
from slackwater.rl.sdk_client import closing

from .service_process import ServiceProcess, gone, wait_for

pytestmark = pytest.mark.process

TURNS, TOKENS = 96, 300


@pytest.fixture
def service(tiny_model: Path, tmp_path: Path) -> Iterator[ServiceProcess]:
    made = ServiceProcess(tmp_path / "state", tiny_model, free_port(), "--engines", "2")
    made.start()
    made.wait_for_workers()
    yield made
    made.stop()


class Samples:
    """Long answers to some prompts, asked for at once."""

    def __init__(self, sdk: tinker.ServiceClient) -> None:
        sampler = sdk.create_sampling_client(base_model="tiny")
        params = types.SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=5)
        prompts = [types.ModelInput.from_ints([65 + number, 66]) for number in range(TURNS)]
        self._futures = [sampler.sample(prompt, 1, params) for prompt in prompts]

    def tokens(self) -> list[list[int]]:
        answers = [future.result(timeout=240) for future in self._futures]
        return [list(answer.sequences[0].tokens) for answer in answers]


def sampled(service: ServiceProcess) -> float:
    """Tokens that all engines have sampled since they were started."""
    told = service.get("/metrics").text
    return sum(float(value) for value in re.findall(r'gauge="produced_tokens".*} (\S+)', told))


def asked_and_stopped(
    service: ServiceProcess, sdk: tinker.ServiceClient, engines: list[int]
) -> tuple[Samples, int]:
    """What was asked for when the engines stopped in the middle of it, and how often it was."""
    for rounds in range(1, 20):
        asked = Samples(sdk)
        time.sleep(0.2)
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)
        if service.status()["gauges"]["rollout_live_turns"] > TURNS // 4:
            return asked, rounds
        for pid in engines:
            os.kill(pid, signal.SIGCONT)
        asked.tokens()
    raise AssertionError("every answer was complete before the engines could be stopped")


@pytest.mark.timeout(600)
def test_workers_outlive_the_control_plane_and_turns_resume_from_their_tokens(
    service: ServiceProcess,
) -> None:
    with closing(tinker.ServiceClient(base_url=service.url, api_key=service.key)) as sdk:
        expected = Samples(sdk).tokens()
        each = sum(map(len, expected))
        # A turn that is moved to the other engine makes a late token or two where it was.
        wait_for("all counts", lambda: sampled(service) >= each)
        pids = service.status()["pids"]
        engines = [pid for name, pid in pids.items() if name.startswith("engine")]
        asked, rounds = asked_and_stopped(service, sdk, engines)
        service.kill()
        for pid in engines:
            os.kill(pid, signal.SIGCONT)
        service.start()
        assert asked.tokens() == expected
    wait_for("the workers", lambda: service.status()["pids"] == pids)
    assert not any(gone(pid) for pid in pids.values())
    wait_for("all counts", lambda: sampled(service) >= (1 + rounds) * each)
    assert sampled(service) <= 1.02 * (1 + rounds) * each  # next to nothing was sampled twice
    service.stop()
    wait_for("the end of all workers", lambda: all(gone(pid) for pid in pids.values()))
