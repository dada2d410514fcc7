"""A control plane without workers behind its HTTP application, in this process."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from harness.front_end import front_end
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.settings import ServiceSettings
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.weights.joined_file import ExportCatalog

Work = Callable[[ControlPlane, httpx.AsyncClient], Awaitable[None]]


def with_plane(folder: Path, work: Work, **settings: Any) -> None:
    """Run `work` with a plane on the folder; a second call is a restart of the service."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    config = {"vocab_size": 300, "max_position_embeddings": 64, "eos_token_id": 1}
    (model / "config.json").write_text(json.dumps(config))

    async def scenario() -> None:
        state = StateDirectory(folder / "state")
        fixed = {"hold_s": 0.05, "tenants": ("mine", "other"), "allowed_hosts": ("test",)}
        options = {**fixed, **settings}
        configured = ServiceSettings(state=state.root, models={"tiny": model}, **options)
        plane = ControlPlane(configured, state, ExportCatalog(state.weights))
        await plane.store.open()
        await plane.sessions.adopt(asyncio.get_running_loop().time())
        await plane.training.adopt()
        await plane.sampling.adopt()
        plane.sampling.resume()
        headers = {"x-api-key": plane.tenants.key_of(configured.tenants[0])}
        async with (
            front_end(plane) as app,
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://test/api/v1", headers=headers
            ) as client,
        ):
            await work(plane, client)
        await plane.stop()
        assert not plane.failed.is_set()

    asyncio.run(scenario())
