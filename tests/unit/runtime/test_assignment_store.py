"""Device assignments outlive the control plane."""

import asyncio
from pathlib import Path

from slackwater.model.ids import DeploymentId, DeviceId
from slackwater.runtime.net.background import Background
from slackwater.runtime.store.assignments import AssignmentStore
from slackwater.runtime.store.database import Store


def test_the_last_assignments_are_read_by_the_next_control_plane(tmp_path: Path) -> None:
    kept = {DeploymentId("trainer-0"): (DeviceId("a/cuda:0"), DeviceId("a/cuda:1"))}

    async def scenario() -> None:
        for _ in range(2):  # written anew, then over
            store, errors = Store(f"sqlite:///{tmp_path / 'db'}"), list[BaseException]()
            await store.open()
            background = Background(errors.append)
            assignments = AssignmentStore(store, background)
            before = await assignments.read()
            assert before in ({}, kept)
            assignments.save_soon(lambda: kept)
            assignments.save_soon(lambda: kept)
            await background.drain(60.0)
            assert await assignments.read() == kept
            await store.close()
            assert not errors

    asyncio.run(scenario())
