"""Permits over HTTP against a real service: people's own code shares the nodes phase by phase."""

import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from tinker import types

from harness.ports import free_port

from .service_process import ServiceProcess, wait_for
from .test_switched_models import TEXT, example

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

PROFILE = {"rollout_s": 1.0, "train_s": 1.0}
WAIT_S = 240.0
PROMPT = types.ModelInput.from_ints(TEXT)
LIMITS = {"lease_s": 10.0, "least_s": 30.0, "yield_s": 600.0}


def _options(**limits: float) -> list[str]:
    given = (["--set", f"coschedule.limits.{name}={value}"] for name, value in limits.items())
    return ["--set", "coschedule.placement=group", *chain.from_iterable(given)]


@pytest.fixture(scope="module")
def shared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    state = tmp_path_factory.mktemp("permits") / "state"
    found = ServiceProcess(state, tiny_model, free_port(), *_options(**LIMITS))
    found.start()
    yield found
    assert found.stop() == 0


@pytest.fixture
def service(shared: ServiceProcess) -> Iterator[ServiceProcess]:
    """Without the jobs of the test before."""
    yield shared
    for row in _state(shared)["jobs"]:
        if row["stage"] not in ("refused", "finished", "failed", "stopped"):
            name = row["job"].removeprefix("default/")
            _delete(shared, f"/slackwater/jobs/{name}", {})


def _delete(service: ServiceProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"x-api-key": service.key}
    answer = httpx.request("DELETE", service.url + path, json=body, headers=headers, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


class Owner:
    """One job's own code."""

    def __init__(self, service: ServiceProcess, name: str, **terms: Any) -> None:
        self.service, self.name = service, name
        body = {"name": name, "iterations": 50, "slo": 3.0, "profile": PROFILE} | terms
        self.answer = service.post("/slackwater/jobs", body)

    def ask(self, phase: str, iteration: int) -> httpx.Response:
        path = f"/slackwater/jobs/{self.name}/permits"
        return self.service.post(path, {"phase": phase, "iteration": iteration})

    def permit(self, phase: str, iteration: int) -> int:
        answer = self.ask(phase, iteration)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["permit"])

    def progress(self, permit: int, **done: int) -> dict[str, Any]:
        path = f"/slackwater/jobs/{self.name}/permits/{permit}/progress"
        found: dict[str, Any] = self.service.post(path, done).json()
        return found

    def give_back(self, permit: int) -> dict[str, Any]:
        path = f"/slackwater/jobs/{self.name}/permits/{permit}"
        return _delete(self.service, path, {"work_s": 0.5})


def _state(service: ServiceProcess) -> dict[str, Any]:
    found: dict[str, Any] = service.get("/slackwater/coschedule").json()
    return found


def _training_client(service: ServiceProcess, job: str) -> tinker.TrainingClient:
    """Of the SDK, which knows nothing of permits."""
    sdk = tinker.ServiceClient(
        base_url=service.url, api_key=service.key, user_metadata={"slackwater_job": job}
    )
    return sdk.create_lora_training_client(base_model="tiny", rank=4, seed=3)


def test_two_jobs_take_turns_on_one_rollout_node(service: ServiceProcess) -> None:
    a, b = Owner(service, "a"), Owner(service, "b")
    assert a.answer.json()["stage"] == b.answer.json()["stage"] == "placed", b.answer.text
    first = a.permit("rollout", 0)
    assert a.permit("rollout", 0) == first  # the same request
    got: list[int] = []
    waits = threading.Thread(target=lambda: got.append(b.permit("rollout", 0)))
    waits.start()

    def b_waits() -> bool:
        assert a.progress(first)["state"] == "held"
        return any(row["waits_s"] for row in _state(service)["jobs"])

    wait_for("b to wait", b_waits)
    assert not got
    held = {row["node"]: row["job"] for row in _state(service)["nodes"]}
    assert held == {"rollout-0": "default/a", "train-0": None}
    refused = a.ask("train", 0)
    assert refused.status_code == 400 and "give that back first" in refused.text
    assert a.progress(first, finished=1, total=8)["state"] == "held"
    assert a.give_back(first)["state"] == "returned"
    waits.join(WAIT_S)
    assert got and got[0] != first
    assert a.permit("train", 0) > got[0]
    drawn = service.get("/slackwater/coschedule/timeline").json()["traceEvents"]
    assert any(event["name"] == "default/a rollout" for event in drawn)
    sync = a.ask("sync", 0)
    assert sync.status_code == 200 and sync.json()["nodes"] == []


def test_a_holder_that_vanishes_loses_the_permit_and_the_others_go_on(
    service: ServiceProcess,
) -> None:
    gone, stays = Owner(service, "gone"), Owner(service, "stays")
    lost = gone.permit("rollout", 0)
    assert stays.permit("rollout", 0) != lost  # within the time of one request
    said = gone.progress(lost)
    assert said["state"] == "taken" and "sent no report" in said["reason"]
    rows = {row["job"]: row for row in _state(service)["jobs"]}
    assert rows["default/gone"]["stage"] == "held"  # until it asks again


def test_what_cannot_be_is_refused_in_one_line(service: ServiceProcess) -> None:
    assert "slo: 0.5 must be at least 1" in Owner(service, "x", slo=0.5).answer.text
    huge = Owner(service, "huge", profile=PROFILE | {"rollout_nodes": 9}).answer.json()
    assert huge["stage"] == "refused" and "the pool has 1" in huge["reason"]
    late = service.post("/slackwater/jobs/huge/permits", {"phase": "rollout", "iteration": 0})
    assert late.status_code == 400 and "is refused" in late.text
    nobody = service.post("/slackwater/jobs/nobody/permits", {"phase": "rollout", "iteration": 0})
    assert nobody.status_code == 404


def test_a_client_whose_job_waits_for_a_place_is_told_why_and_goes_on_when_it_has_one(
    service: ServiceProcess, caplog: pytest.LogCaptureFixture
) -> None:
    Owner(service, "fills", slo=1.0)
    held = Owner(service, "waits", profile=PROFILE | {"rollout_s": 40.0})
    assert held.answer.json()["stage"] == "held", held.answer.text
    client = _training_client(service, "waits")
    waiting = client.forward_backward([example(0)], "cross_entropy")
    said = "Reason: job default/waits waits for a place: no group can take it"
    wait_for("the client to be told", lambda: said in caplog.text)
    _delete(service, "/slackwater/jobs/fills", {})
    assert waiting.result(WAIT_S).metrics["loss:sum"] > 0


def test_a_client_that_stops_in_the_middle_of_its_rollout_keeps_nobody_waiting(
    service: ServiceProcess,
) -> None:
    stops, other = Owner(service, "stops", slo=100.0), Owner(service, "other", slo=100.0)
    client = _training_client(service, "stops")
    sampler = client.save_weights_and_get_sampling_client()
    sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2)).result(WAIT_S)
    held = {row["node"]: row["job"] for row in _state(service)["nodes"]}
    assert held["rollout-0"] == "default/stops" and stops.answer.is_success
    other.give_back(other.permit("rollout", 0))  # within the time of one request
    assert client.forward_backward([example(0)], "cross_entropy").result(WAIT_S).metrics


def test_a_client_that_only_trains_goes_on_for_as_long_as_it_likes_and_others_train_between(
    service: ServiceProcess,
) -> None:
    trains, other = Owner(service, "trains", slo=100.0), Owner(service, "other", slo=100.0)
    assert trains.answer.json()["stage"] == other.answer.json()["stage"] == "placed"
    client = _training_client(service, "trains")
    got: list[int] = []

    def ask() -> None:
        for phase in ("rollout", "train"):
            while (answer := other.ask(phase, 0)).status_code == 202:
                pass
            got.append(other.give_back(int(answer.json()["permit"]))["permit"])

    def step() -> None:
        passed = client.forward_backward([example(0)], "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(passed.result(WAIT_S).metrics["loss:sum"])
        stepped.result(WAIT_S)

    losses: list[float] = []
    step()
    waits = threading.Thread(target=ask)
    waits.start()
    deadline_s = time.monotonic() + 120
    while waits.is_alive() and time.monotonic() < deadline_s:
        step()
    assert len(got) == 2, f"no permit beside {len(losses)} steps"
    step()
    assert losses[-1] < losses[0]
    rows = {row["job"]: row for row in _state(service)["jobs"]}
    assert rows["default/trains"]["stage"] == "running"


def test_permits_come_back_with_the_control_plane(service: ServiceProcess) -> None:
    a, b = Owner(service, "a"), Owner(service, "b")
    permit = a.permit("rollout", 0)
    a.give_back(permit)
    train, rollout = a.permit("train", 0), b.permit("rollout", 0)
    service.kill()
    service.start()
    assert a.progress(train)["state"] == "held"
    assert b.progress(rollout)["state"] == "held"
    assert a.give_back(train)["state"] == "returned"
    assert b.give_back(rollout)["state"] == "returned"
    assert a.permit("rollout", 1) > max(train, rollout)


def test_a_session_that_does_nothing_leaves_its_place_and_has_it_again_when_it_goes_on(
    new_service: Callable[..., ServiceProcess],
) -> None:
    service = new_service(*_options(yield_s=3.0))
    service.start()
    Owner(service, "rests", slo=1.0)
    client = _training_client(service, "rests")
    assert client.forward_backward([example(0)], "cross_entropy").result(WAIT_S).metrics
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result(WAIT_S)
    client.save_weights_for_sampler("a").result(WAIT_S)
    waits = Owner(service, "waits", profile=PROFILE | {"rollout_s": 40.0})
    assert waits.answer.json()["stage"] == "held", waits.answer.text

    def stage_of(job: str) -> str:
        return str({row["job"]: row for row in _state(service)["jobs"]}[f"default/{job}"]["stage"])

    wait_for("the place", lambda: stage_of("waits") == "placed")
    assert stage_of("rests") == "held"
    going_on = client.forward_backward([example(0)], "cross_entropy")
    _delete(service, "/slackwater/jobs/waits", {})
    assert going_on.result(WAIT_S).metrics
    assert stage_of("rests") == "running"
