"""What one more viewer of a large live fleet costs the control plane."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Literal

import aiohttp
import uvicorn
from fastapi import FastAPI

from browser.recorded_fleet import write_recording
from slackwater.serve.dashboard.recorded import RecordedSource
from slackwater.serve.dashboard.routes import dashboard_routes
from slackwater.serve.http.server import bind
from slackwater.timeline.lanes import ROLLOUT

VIEWERS, MEASURED_S, LANES_IN_VIEW = 8, 10.0, 52


class LiveFleet(RecordedSource):
    """A recording of 100 jobs on 1,000 devices that goes on."""

    mode: Literal["live", "recording"] = "live"

    def __init__(self, trace: Path) -> None:
        super().__init__(trace)
        self._began_s = time.monotonic()

    def now_s(self) -> float:
        return self._end_s + time.monotonic() - self._began_s

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

    async def spent_s(self) -> float:
        assert self._thread.ident is not None
        clock = time.pthread_getcpuclockid(self._thread.ident)
        before_s = time.clock_gettime(clock)
        await asyncio.sleep(MEASURED_S)
        return time.clock_gettime(clock) - before_s

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(30)


async def watch(browser: aiohttp.ClientSession) -> None:
    """What an open page asks for; see `timeline.js`."""

    async def read_events() -> None:
        async with browser.get("/dashboard/api/events") as answer:
            async for _ in answer.content.iter_any():
                pass

    async def read_strips() -> None:
        while True:
            async with browser.get("/dashboard/api/overview") as answer:
                await answer.read()
            await asyncio.sleep(5.0)

    beside = [asyncio.create_task(read_events()), asyncio.create_task(read_strips())]
    start_s = 6 * 3600.0 - 180.0
    window = f"start={start_s}&end={start_s + 240}&width=2400&first=0&count={LANES_IN_VIEW}"
    more = ""
    try:
        while True:
            async with browser.get(f"/dashboard/api/timeline?{window}{more}") as answer:
                assert answer.status == 200
                found = await answer.json()
            assert len(found["rows"]) == LANES_IN_VIEW
            more = f"&since={found['now_s'] - 10}&names={found['names']}"
            await asyncio.sleep(1.5)
    finally:
        for task in beside:
            task.cancel()


async def share_of_a_viewer(server: Server, key: str) -> float:
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(server.url, cookie_jar=jar) as browser:
        async with browser.post("/dashboard/api/login", json={"key": key}) as answer:
            assert answer.status == 200
        watching = [asyncio.create_task(watch(browser))]
        await asyncio.sleep(3.0)
        one_s = await server.spent_s()
        watching += [asyncio.create_task(watch(browser)) for _ in range(VIEWERS)]
        await asyncio.sleep(3.0)
        all_s = await server.spent_s()
        for task in watching:
            task.cancel()
        ended = await asyncio.gather(*watching, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended
    print(f"in {MEASURED_S:.0f} s: one viewer {one_s:.2f} s, {VIEWERS + 1} viewers {all_s:.2f} s")
    return (all_s - one_s) / MEASURED_S / VIEWERS


def test_a_viewer_of_a_thousand_lanes_costs_a_hundredth_of_a_core(tmp_path: Path) -> None:
    source = LiveFleet(write_recording(tmp_path / "fleet.json"))
    server = Server(source)
    try:
        share = asyncio.run(share_of_a_viewer(server, source.key))
    finally:
        server.stop()
    print(f"CPU of the control plane per viewer: {share:.2%} of a core")
    assert share <= 0.01
