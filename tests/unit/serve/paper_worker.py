"""A sandbox worker on paper: it answers the control plane at once, keeps real snapshot folders, and
runs nothing."""

import asyncio
from pathlib import Path
from typing import Any

import httpx

from slackwater.model.errors import SlackwaterError
from slackwater.model.ids import WorkerId
from slackwater.runtime.plane import ControlPlane
from slackwater.sandbox.snapshots import Snapshots
from slackwater.wire import messages, sandbox
from slackwater.wire.frames import FrameDecoder

WORKER = WorkerId("w0")


class PaperWorker:
    """`told` is what it was told. Actions go on until `finish` is called."""

    def __init__(self, plane: ControlPlane, folder: Path, cores: int = 2, mib: int = 8192) -> None:
        self.told: list[Any] = []
        self.snapshot_bytes = 0
        self.started = asyncio.Event()
        self.body = plane._action_executor
        self.snapshots = Snapshots(folder / "snapshots", "copy")
        self._loop = asyncio.get_running_loop()
        plane.hub.send = self._hear  # type: ignore[method-assign]
        facts = sandbox.SandboxFacts("n0", [list(range(cores))], mib, "bubblewrap", isolates=True)
        self.body.worker_joined(WORKER, facts)

    def runs(self) -> list[sandbox.RunAction]:
        return [one for one in self.told if isinstance(one, sandbox.RunAction)]

    def finish(self, attempt: int) -> None:
        over = sandbox.ActionFinished(attempt, "exited", 0, "", 0.0, 0.01, 0.01, 1)
        self._say(over)

    def _hear(self, worker: WorkerId, message: Any) -> None:
        assert worker == WORKER
        self.told.append(message)
        match message:
            case sandbox.RunAction():
                self.started.set()
            case sandbox.OpenEnvironment(environment):
                self._loop.call_soon(self._say, self._opened(environment, message.snapshot))
            case sandbox.KeepSnapshot():
                self._loop.call_soon(self._say, self._kept(message))

    def _opened(self, environment: str, snapshot: str | None) -> Any:
        try:
            if snapshot is not None:
                self.snapshots.find(snapshot)
        except SlackwaterError as error:
            return sandbox.EnvironmentFailed(environment, str(error))
        return sandbox.EnvironmentReady(environment)

    def _kept(self, message: sandbox.KeepSnapshot) -> Any:
        try:
            partial = self.snapshots.partial(message.name)
            partial.mkdir()
            self.snapshots.keep(partial, message.name)
        except SlackwaterError as error:
            return sandbox.SnapshotKept(message.request, str(error))
        return sandbox.SnapshotKept(message.request, None, self.snapshot_bytes)

    def _say(self, message: Any) -> None:
        for frame in FrameDecoder().feed(messages.encode(message)):
            self.body.handle_frame(WORKER, frame)


class Caller:
    """One tenant's calls of the action API."""

    def __init__(self, plane: ControlPlane, client: httpx.AsyncClient, tenant: str) -> None:
        self._client = client
        self._headers = {"x-api-key": plane.tenants.key_of(tenant)}

    async def post(self, path: str, **body: Any) -> httpx.Response:
        url = f"http://test/slackwater/{path}"
        return await self._client.post(url, json=body, headers=self._headers)

    async def get(self, path: str) -> httpx.Response:
        return await self._client.get(f"http://test/slackwater/{path}", headers=self._headers)

    async def delete(self, path: str) -> httpx.Response:
        return await self._client.delete(f"http://test/slackwater/{path}", headers=self._headers)
