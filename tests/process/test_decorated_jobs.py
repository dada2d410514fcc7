"""People's own programs under the decorators, against a real service: they share its nodes, and one
that is killed holds nobody up.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.ports import free_port

from .service_process import ServiceProcess, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

PROGRAM = """
import json, sys, time
import slackwater
import slackwater.phases.job

slackwater.phases.job._ALIVE_S = 0.5
slackwater.join(sys.argv[1], iterations=4, slo=3.0, profile={"rollout_s": 0.2, "train_s": 0.2})

@slackwater.phase("rollout")
def rollout():
    return work("rollout")

@slackwater.phase("train")
def train():
    return work("train")

def work(phase):
    began = time.monotonic()
    if sys.argv[2] == "hangs" and phase == "train":
        print("stuck", flush=True)
        time.sleep(600)
    time.sleep(0.2)
    return [phase, began, time.monotonic()]

if sys.argv[2] == "pauses":
    rollout()
    print("pauses", flush=True)
    time.sleep(600)
print(json.dumps([span for _ in range(4) for span in (rollout(), train())]), flush=True)
"""


@pytest.fixture(scope="module")
def service(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    found = ServiceProcess(
        *(tmp_path_factory.mktemp("decorated") / "state", tiny_model, free_port()),
        *("--set", "coschedule.placement=group", "--set", "coschedule.limits.lease_s=12.0"),
        *("--set", "coschedule.limits.gone_s=12.0"),
    )
    found.start()
    yield found
    assert found.stop() == 0


def started(service: ServiceProcess, name: str, how: str = "works") -> "subprocess.Popen[str]":
    environment = os.environ | {"SLACKWATER_URL": service.url, "SLACKWATER_KEY": service.key}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, name, how],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def stage(service: ServiceProcess, name: str) -> str:
    return str(service.get(f"/slackwater/jobs/{name}").json()["stage"])


def spans(process: "subprocess.Popen[str]") -> list[tuple[str, float, float]]:
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    return [tuple(span) for span in json.loads(output.splitlines()[-1])]


def test_two_programs_never_hold_the_same_node_at_the_same_time(service: ServiceProcess) -> None:
    one, other = (started(service, name) for name in ("one", "other"))
    found = spans(one) + spans(other)
    assert len(found) == 16
    for phase in ("rollout", "train"):
        held = sorted(span[1:] for span in found if span[0] == phase)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(held))


def test_a_program_that_is_killed_in_its_phase_holds_nobody_up_for_ever(
    service: ServiceProcess,
) -> None:
    doomed = started(service, "doomed", "hangs")
    assert doomed.stdout is not None
    assert doomed.stdout.readline().strip() == "stuck"
    other = started(service, "survivor")
    doomed.send_signal(signal.SIGKILL)
    doomed.communicate(timeout=200)
    assert len(spans(other)) == 8


def test_the_operator_stops_a_program_that_was_killed(service: ServiceProcess) -> None:
    killed = started(service, "killed", "hangs")
    assert killed.stdout is not None
    assert killed.stdout.readline().strip() == "stuck"
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=200)
    stopped = service.post("/slackwater/jobs/killed/stop", {})
    assert stopped.status_code == 202 and stopped.json()["stage"] == "stopped", stopped.text
    assert len(spans(started(service, "next"))) == 8


def test_a_program_that_is_told_to_end_gives_its_permit_back(service: ServiceProcess) -> None:
    told = started(service, "told", "hangs")
    assert told.stdout is not None
    assert told.stdout.readline().strip() == "stuck"
    told.send_signal(signal.SIGTERM)
    told.communicate(timeout=200)
    assert told.returncode == 128 + signal.SIGTERM
    found = service.get("/slackwater/jobs/told").json()
    assert found["stage"] == "stopped" and "SIGTERM" in found["reason"]


def test_a_program_keeps_its_place_while_it_lives_and_leaves_it_when_killed_between_phases(
    service: ServiceProcess,
) -> None:
    program = started(service, "pauses", "pauses")
    assert program.stdout is not None
    assert program.stdout.readline().strip() == "pauses"
    long_s = time.monotonic() + 20.0
    wait_for("longer than silence may last", lambda: time.monotonic() > long_s)
    assert stage(service, "pauses") == "placed"
    program.send_signal(signal.SIGKILL)
    program.communicate(timeout=200)
    wait_for("its end", lambda: stage(service, "pauses") == "stopped")
