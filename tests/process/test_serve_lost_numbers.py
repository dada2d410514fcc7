"""Numbers that a client skips: what waits behind them ends by itself, whatever the client does
next.
"""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.front_end import front_end
from slackwater.control.operations.settings import OperationsConfig
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.settings import ServiceSettings
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.weights.joined_file import ExportCatalog

pytestmark = pytest.mark.process


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def outcome(client: httpx.AsyncClient, request: str) -> Any:
    async with asyncio.timeout(120):
        while True:
            answer = await client.post("retrieve_future", json={"request_id": request})
            if answer.status_code != 408:
                return answer.json()


async def send_three_then_one(client: httpx.AsyncClient) -> tuple[Any, Any]:
    session = (await post(client, "create_session", sdk_version="0"))["session_id"]
    model = (
        await post(client, "create_model", session_id=session, model_seq_id=0, base_model="tiny")
    )["model_id"]
    steps = {
        seq: (await post(client, "optim_step", model_id=model, seq_id=seq, adam_params={}))
        for seq in (3, 1)
    }
    return (
        await outcome(client, steps[1]["request_id"]),
        await outcome(client, steps[3]["request_id"]),
    )


def test_three_then_one_and_never_two_ends_by_itself(tiny_model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        state = StateDirectory(tmp_path / "state")
        settings = ServiceSettings(
            state=state.root,
            models={"tiny": tiny_model},
            operations=OperationsConfig(give_up_gap_after_s=0.5),
        )
        plane = ControlPlane(settings, state, ExportCatalog(state.weights))
        state.logs.mkdir(parents=True)
        await plane.start()
        try:
            headers = {"x-api-key": plane.tenants.key_of("default")}
            async with (
                front_end(plane) as app,
                httpx.AsyncClient(
                    transport=httpx.ASGITransport(app),
                    base_url="http://localhost/api/v1",
                    headers=headers,
                ) as client,
            ):
                first, third = await send_three_then_one(client)
        finally:
            await plane.stop()
        assert first["metrics"]["optimizer_steps"] == 0.0
        assert "forward_backward seq 2 never arrived" in third["error"]

    asyncio.run(scenario())
