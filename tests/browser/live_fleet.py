"""A live fleet of 100 jobs on 1,000 devices behind the dashboard's routes, without workers."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI

from slackwater.serve.dashboard.browser_sessions import Viewer
from slackwater.serve.dashboard.recorded import RecordedSource
from slackwater.serve.dashboard.routes import dashboard_routes
from slackwater.serve.http.server import bind
from slackwater.timeline.lanes import ROLLOUT


class LiveFleet(RecordedSource):
    """A recording of 100 jobs on 1,000 devices that goes on."""

    mode: Literal["live", "recording"] = "live"

    def __init__(self, trace: Path) -> None:
        super().__init__(trace)
        self._began_s = time.monotonic()

    def now_s(self) -> float:
        return self._end_s + time.monotonic() - self._began_s

    def snapshot(self, viewer: Viewer) -> dict[str, Any]:
        return super().snapshot(viewer) | {"now_s": round(self.now_s(), 3)}

    async def work(self) -> None:
        """Every lane ends a span a second."""
        while True:
            now_s = self.now_s()
            for number, lane in enumerate(self.timeline.lanes()):
                self.timeline.append(lane, number % 100, ROLLOUT, now_s - 0.9, now_s)
            await asyncio.sleep(1.0)


class Server:
    """The dashboard in a thread, whose processor time can be read."""

    def __init__(self, source: LiveFleet) -> None:
        app = FastAPI()
        app.include_router(dashboard_routes(source))
        self._listening = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        self._source = source
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    async def _run(self) -> None:
        working = asyncio.create_task(self._source.work())
        await self._server.serve(sockets=[self._listening])
        working.cancel()

    async def spent_s(self, during_s: float) -> float:
        assert self._thread.ident is not None
        clock = time.pthread_getcpuclockid(self._thread.ident)
        before_s = time.clock_gettime(clock)
        await asyncio.sleep(during_s)
        return time.clock_gettime(clock) - before_s

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(30)
