"""A tenant whose checkpoints take all its share of the disk saves no more until it deletes some."""

import shutil
from pathlib import Path
from typing import Any

import httpx
from test_app import open_model

from harness.service_plane import with_plane
from slackwater.model.ids import WorkerId
from slackwater.model.tenant_limits import OperatorLimits
from slackwater.runtime.plane import ControlPlane
from slackwater.wire import messages

TRAINER = WorkerId("t0")
SAVED_BYTES = 1 << 20


class PaperTrainer:
    """Writes a file for each state that it saves, and does nothing else."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        plane.hub.send = self._receive  # type: ignore[method-assign]
        plane.training.trainer_joined(TRAINER)

    def _receive(self, worker: WorkerId, message: Any) -> None:
        if isinstance(message, messages.SaveState):
            folder = self._plane.state.path(message.saved)
            folder.mkdir(parents=True)
            (folder / "state").write_bytes(b"x" * SAVED_BYTES)
        if (ticket := getattr(message, "op", None)) is not None:
            self._plane.training.handle_message(worker, messages.OpDone(ticket, 0.01))


async def save(client: httpx.AsyncClient, model: str, seq: int, name: str) -> dict[str, Any]:
    """The outcome of a save, at once or after a wait."""
    asked = await client.post("save_weights", json={"model_id": model, "seq_id": seq, "path": name})
    assert asked.status_code == 200, asked.text
    request = {"request_id": asked.json()["request_id"]}
    while (answer := await client.post("retrieve_future", json=request)).status_code == 408:
        pass
    outcome: dict[str, Any] = answer.json()
    return outcome


def with_room(folder: Path, saves: float, work: Any) -> None:
    """With room for that many saved states."""
    share = saves * SAVED_BYTES / shutil.disk_usage(folder).total

    async def trained(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        PaperTrainer(plane)
        _, model, _ = await open_model(client)
        await work(client, model)

    with_plane(folder, trained, limits=OperatorLimits(checkpoint_share=share))


def test_a_save_beyond_the_share_is_refused_until_one_is_deleted(tmp_path: Path) -> None:
    async def work(client: httpx.AsyncClient, model: str) -> None:
        for seq, name in enumerate(("one", "two"), 1):
            assert (await save(client, model, seq, name))["path"].endswith(name)
        full = await save(client, model, 3, "three")
        assert "[limits] checkpoint_share" in full["error"], full
        assert (await save(client, model, 4, "four"))["error"] == full["error"]
        assert (await client.delete(f"training_runs/{model}/checkpoints/weights/one")).is_success
        assert (await save(client, model, 5, "five"))["path"].endswith("five")

    with_room(tmp_path, 1.5, work)
