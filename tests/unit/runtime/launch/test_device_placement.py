"""Nodes join with devices, and each of their workers gets some, gets the same again, or is refused
with the reason.
"""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.service_plane import with_plane
from slackwater.model.device import CUDA, Device
from slackwater.model.errors import RefusedError, UnavailableError
from slackwater.model.ids import NodeId, WorkerId
from slackwater.runtime.launch.port import WorkerPlan
from slackwater.runtime.plane import ControlPlane
from slackwater.wire.agent import NodeFacts, WorkerEnded

LOCAL = NodeId("local")


def node(indices: range, name: str = LOCAL) -> NodeFacts:
    devices = (
        Device(NodeId(name), at, CUDA, visible=str(at), hardware=f"GPU-{at}") for at in indices
    )
    return NodeFacts(name, "local", devices=tuple(devices))


class Spawner:
    """Processes that never end, in place of a node's agent."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plans: dict[str, WorkerPlan] = {}
        plane.fleet.supervisor._spawn = self
        plane.fleet.nodes.spawn = self  # type: ignore[method-assign,assignment]

    async def __call__(self, at: NodeId, plan: WorkerPlan, worker: WorkerId) -> Any:
        self.plans[plan.name] = plan
        await asyncio.Event().wait()


def owners(plane: ControlPlane) -> dict[str, list[str]]:
    (row,) = plane.fleet.rows()
    return {one["device"]: one["owners"] for one in row["devices"]}


def test_workers_are_started_on_the_devices_that_they_own(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        spawner = Spawner(plane)
        plane.fleet.agent_joined(node(range(4)))
        await asyncio.sleep(0)
        assert owners(plane) == {
            "local/cuda:0": ["trainer-0"],
            "local/cuda:1": ["engine-0-0"],
            "local/cuda:2": ["engine-0-1"],
            "local/cuda:3": ["engine-0-2"],
        }
        visible = {name: plan.devices[0].visible for name, plan in spawner.plans.items()}
        assert visible == {
            "trainer-0": "0",
            "engine-0-0": "1",
            "engine-0-1": "2",
            "engine-0-2": "3",
        }
        with pytest.raises(
            RefusedError, match=r"node b: b/cuda:3 \(GPU-3\) is already local/cuda:3"
        ):
            plane.fleet.agent_joined(node(range(3, 5), "b"))
        assert plane.fleet.nodes.names() == (LOCAL,)

    with_plane(tmp_path, work, device="cuda")


def test_a_restarted_control_plane_gives_workers_the_devices_that_they_had(tmp_path: Path) -> None:
    async def first(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        Spawner(plane)
        plane.fleet.agent_joined(node(range(1, 4)))
        assert owners(plane)["local/cuda:1"] == ["trainer-0"]

    async def second(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        Spawner(plane)
        await plane.fleet.adopt()
        plane.fleet.agent_joined(node(range(4)))
        assert owners(plane)["local/cuda:1"] == ["trainer-0"]
        assert owners(plane)["local/cuda:0"] == ["engine-0-2"]
        plane.fleet.agent_lost(LOCAL)
        plane.fleet.agent_joined(node(range(4)))
        assert owners(plane)["local/cuda:0"] == ["engine-0-2"]

    with_plane(tmp_path, first, device="cuda")
    with_plane(tmp_path, second, device="cuda")


def test_a_worker_without_a_device_is_a_problem_that_says_why(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        Spawner(plane)
        plane.fleet.agent_joined(node(range(2)))
        await asyncio.sleep(0)  # those that have devices begin
        status = (await client.get("http://test/slackwater/status")).json()
        (problem,) = status["problems"]
        assert problem.startswith("worker engine-0-1 has no device: engine-0-1 needs 1 cuda device")
        assert "engine-0-1" not in status["starting"]

    with_plane(tmp_path, work, device="cuda", engines=2)


def test_an_added_instance_has_a_free_device_until_it_ends(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        Spawner(plane)
        plane.fleet.agent_joined(node(range(3)))
        plan = WorkerPlan("added-1", "none", (), layout="")
        task = asyncio.create_task(plane.fleet.spawn(plan, WorkerId("added-1")))
        await asyncio.sleep(0)
        assert owners(plane)["local/cuda:2"] == ["added-1"]
        with pytest.raises(UnavailableError, match="added-2 needs 1 cuda device"):
            await plane.fleet.spawn(
                WorkerPlan("added-2", "none", (), layout=""), WorkerId("added-2")
            )
        plane.fleet.handle_agent_message(LOCAL, WorkerEnded("added-1", 0))
        assert owners(plane)["local/cuda:2"] == []
        task.cancel()

    with_plane(tmp_path, work, device="cuda", engines=1)
