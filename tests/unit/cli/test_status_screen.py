"""`slackwater status` on one screen, and the problems that the service names."""

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from harness.service_plane import with_plane
from slackwater.cli.status_screen import status_screen
from slackwater.model.ids import NodeId, WorkerId
from slackwater.runtime.launch.port import WorkerPlan
from slackwater.runtime.plane import ControlPlane


def drawn(found: dict[str, Any]) -> str:
    out = io.StringIO()
    where = {"running": True, "url": "http://here:1", "pid": 7}
    Console(file=out, width=100).print(status_screen(where | found), crop=False)
    return out.getvalue()


def asked(folder: Path, change: Callable[[ControlPlane], Awaitable[None]]) -> dict[str, Any]:
    """The operator's status of a service without workers, after a change."""
    found: dict[str, Any] = {}

    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        await change(plane)
        found.update((await client.get("http://test/slackwater/status")).json())

    with_plane(folder, work)
    return found


async def nothing(plane: ControlPlane) -> None:
    """Leave the service as it is."""


def test_the_screen_is_short_and_names_models_queues_and_jobs_but_no_raw_gauge(
    tmp_path: Path,
) -> None:
    found = asked(tmp_path, nothing)
    screen = drawn(found)
    assert len(screen.splitlines()) <= 24
    for part in ("service", "http://here:1", "models", "tiny", "no engine", "queues", "jobs"):
        assert part in screen
    assert "weights" not in screen and "late tokens" not in screen
    assert "weights_pulls" in json.dumps(found)  # --json keeps the raw figures
    assert found["starting"] == ["agent of node local"]


LONG = "worker x failed; `slackwater instance add --model tiny` " + "adds one " * 12  # to be copied


def test_problems_come_first_and_jobs_that_live_have_a_line_each() -> None:
    job = {"job": "default/one", "stage": "held", "reason": "no room", "device_s": 2.0}
    over = {"job": "default/two", "stage": "finished", "reason": "", "device_s": 9.0}
    gauges = {"rollout_waiting_turns": 3, "rollout_live_turns": 5, "waiting_operations": 1}
    engine = {"instance": "engine-0-0.1", "model": "tiny", "state": "ready"}
    found = {
        **{"models": {"tiny": "/m"}, "workers": {"trainer": ["trainer-0.1"]}, "gauges": gauges},
        **{"instances": [engine], "jobs": [job, over], "problems": [LONG]},
    }
    screen = drawn(found)
    assert screen.splitlines()[0].strip() == f"! {LONG}".strip()  # in one piece
    assert "engines: 1 ready" in screen and "2 run, 3 wait" in screen
    assert "1 held, 1 finished" in screen
    assert "default/one" in screen and "no room" in screen and "default/two" not in screen


async def drained(plane: ControlPlane) -> None:
    """The only engine of the model runs as a real process, and is drained before it joins."""

    async def spawn(node: NodeId, plan: WorkerPlan, worker: WorkerId) -> Any:
        process = await asyncio.create_subprocess_exec("sleep", "600")
        process_of[worker] = process
        begun.set()
        return process

    process_of: dict[WorkerId, Any] = {}
    begun = asyncio.Event()
    supervisor = plane.fleet.supervisor
    supervisor._spawn = spawn
    supervisor.start(NodeId("local"), [WorkerPlan("engine-0-0", "none", ())])
    async with asyncio.timeout(30):
        await begun.wait()
        (worker,) = process_of
        assert supervisor.starting() == ("engine-0-0",)
        supervisor.retire(worker)
        supervisor.kill(worker)
        await asyncio.gather(*supervisor._tasks[NodeId("local")])


def test_a_model_whose_last_engine_was_drained_is_a_problem(tmp_path: Path) -> None:
    found = asked(tmp_path, drained)
    (problem,) = found["problems"]
    assert problem.startswith("model tiny: no engine serves it, the last one was drained")
    assert problem.endswith("requests get 503") and "instance add --model tiny" in problem
    assert drawn(found).startswith("! model tiny: no engine serves it")


def test_requests_for_a_model_whose_last_engine_was_drained_end_with_the_reason(
    tmp_path: Path,
) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        made = await client.post("create_session", json={"sdk_version": "0"})
        session = {"session_id": made.json()["session_id"], "sampling_session_seq_id": 0}
        opened = await client.post("create_sampling_session", json=session | {"base_model": "tiny"})
        sample = {
            "sampling_session_id": opened.json()["sampling_session_id"],
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
            "sampling_params": {"max_tokens": 2},
        }
        waiting = (await client.post("asample", json=sample | {"seq_id": 1})).json()
        early = {"request_id": waiting["request_id"]}
        assert (await client.post("retrieve_future", json=early)).status_code == 408
        await drained(plane)
        late = await client.post("asample", json=sample | {"seq_id": 2})
        assert late.status_code == 503 and "no engine serves it" in late.json()["error"]
        ended = await client.post("retrieve_future", json=early)
        assert ended.status_code == 200 and ended.json()["category"] == "server"
        assert "no engine serves it" in ended.json()["error"]

    with_plane(tmp_path, work)
