"""A fact, such as the assignments of devices, outlives the control plane."""

import asyncio
from pathlib import Path

from slackwater.model.ids import DeploymentId, DeviceId
from slackwater.runtime.net.background import Background
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.facts import SavedFact


def test_the_last_assignments_are_read_by_the_next_control_plane(tmp_path: Path) -> None:
    kept = {DeploymentId("trainer-0"): (DeviceId("a/cuda:0"), DeviceId("a/cuda:1"))}

    kind = dict[DeploymentId, tuple[DeviceId, ...]]

    async def scenario() -> None:
        for _ in range(2):  # written anew, then over
            store, errors = Store(f"sqlite:///{tmp_path / 'db'}"), list[BaseException]()
            await store.open()
            background = Background(errors.append)
            assignments = SavedFact(store, background, "device_assignments", lambda: kept)
            assert await assignments.read(kind) in (None, kept)
            assignments.save_soon()
            assignments.save_soon()
            await assignments.wait_until_saved()
            assert await assignments.read(kind) == kept
            await background.drain(60.0)
            await store.close()
            assert not errors

    asyncio.run(scenario())
