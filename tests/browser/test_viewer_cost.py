"""What one more viewer of a large live fleet costs the control plane."""

import asyncio
from pathlib import Path

import aiohttp

from browser.live_fleet import LiveFleet, Server
from browser.recorded_fleet import write_recording

VIEWERS, MEASURED_S, LANES_IN_VIEW = 8, 10.0, 52


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
        one_s = await server.spent_s(MEASURED_S)
        watching += [asyncio.create_task(watch(browser)) for _ in range(VIEWERS)]
        await asyncio.sleep(3.0)
        all_s = await server.spent_s(MEASURED_S)
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
