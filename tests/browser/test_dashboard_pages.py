"""The dashboard used as a person would use it, on a live two-job run and on a recorded one.

`$SLACKWATER_PICTURES` is a folder for screenshots: docs/images to renew those of the manual.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from browser.chromium import Chromium, Page, find_chromium
from browser.live_fleet import LiveFleet, Server
from browser.recorded_fleet import write_recording
from process.service_process import ServiceProcess
from slackwater.zoo.tiny import make_model

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="needs Chromium")

ROWS = "document.querySelectorAll('tr[data-job]').length"
VIEWERS, MEASURED_S = 8, 8.0
FIRST_VIEW_S = 1.0
FRAME_S = 1 / 60  # of processor time, so that a page on a free machine never misses a frame


def job_file(name: str, step: int) -> dict[str, Any]:
    options = {"environment": {"step": step}}
    made = {"name": name, "model": "tiny", "recipe": "count-on", "iterations": 200, "slo": 2.5}
    return made | {"options": options}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    """Two jobs share one rollout and one train node."""
    make_model("compact", tmp_path / "model")
    options = ("--set", "coschedule.placement=group")
    found = ServiceProcess(tmp_path / "state", tmp_path / "model", _free_port(), *options)
    found.start()
    try:
        yield found
    finally:
        found.stop()


def _free_port() -> int:
    from slackwater.serve.http.server import bind

    with contextlib.closing(bind("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


async def picture(page: Page, name: str, tmp_path: Path, shows: str = "") -> None:
    """Of the top of the page, or of where an element is in view."""
    if shows:
        await page.place(shows)
    else:
        await page.value("window.scrollTo(0, 0)")
    folder = os.environ.get("SLACKWATER_PICTURES", str(tmp_path))
    await page.picture(Path(folder) / f"dashboard-{name}.png")


def own_errors(page: Page) -> list[str]:
    """Without the refusals that the test asks for: no session yet, a wrong key."""
    return [error for error in page.errors if not error.endswith(("api/session", "api/login"))]


async def drawn(page: Page, canvas: str, colors: int) -> None:
    """Until so many colours are on a canvas: spans, not only lanes."""
    pixels = "getContext('2d').getImageData(200, 0, 800, 38).data.buffer"
    await page.wait(
        f"new Set(new Uint32Array(document.querySelector('{canvas}').{pixels})).size >= {colors}"
    )


def within(limit_s: float) -> float:
    """A wait that ends in that time on a machine that is free has longer on one that is not."""
    return limit_s * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


async def zoomed(page: Page) -> None:
    """The wheel narrows the window, dragging moves it."""
    shown = "document.querySelector('.tools .note').textContent"
    await page.wait(f"{shown}.includes('lanes')")
    before = await page.value(shown)
    left, top, width, height = await page.place("canvas.lanes")
    for _ in range(4):
        await page.wheel(left + width * 0.6, top + height / 2, -240)
    await page.wait(f"{shown} !== {before!r}")
    x, y = left + width * 0.6, top + height / 2
    await page.drag(x, y, x - 150, y)
    await page.move(x, y)


def test_two_live_jobs_are_watched_stopped_and_resumed(
    service: ServiceProcess, tmp_path: Path
) -> None:
    for name, step in (("up", 1), ("down", -1)):
        assert service.post("/slackwater/jobs", job_file(name, step)).status_code == 201

    async def work() -> None:
        async with Chromium() as page:
            await log_in(page, service, tmp_path)
            await page.wait(f"{ROWS} === 2")
            await page.wait("document.body.innerText.includes('rollout for')", 240)
            await page.wait("/[1-9]\\d* switches/.test(document.body.innerText)", 240)
            await page.wait("document.body.innerText.includes('phases of others')", 120)
            took_s = await page.first_view_s(f"{service.url}/dashboard")
            print(f"first view of a live fleet: {took_s:.2f} s")
            assert took_s <= within(FIRST_VIEW_S)
            await zoomed(page)
            await page.wait("!document.querySelector('.tools .on')")
            await open_job(page)
            await stop_and_resume(page)
            await ask_the_planner(page, tmp_path)
            await look_again(page, tmp_path)
            assert own_errors(page) == []
            assert page.hosts == {service.url.removeprefix("http://")}

    asyncio.run(work())
    for name in ("up", "down"):
        assert service.post(f"/slackwater/jobs/{name}/stop", {}).status_code in (202, 400)
    share = asyncio.run(cpu_share_of_a_viewer(service))
    print(f"CPU of the control plane per viewer: {share:.2%} of a core")
    assert share <= 0.01


async def log_in(page: Page, service: ServiceProcess, tmp_path: Path) -> None:
    await page.open(f"{service.url}/dashboard")
    await page.wait("document.querySelector('.login input') !== null")
    await page.click(".login input")
    await page.type("tml-wrong")
    await page.press("Log in")
    await page.wait("document.querySelector('.login .error') !== null")
    await page.click(".login input")
    await page.type(service.key)
    await page.press("Log in")
    took_s = await page.wait(f"{ROWS} > 0")
    print(f"first view after the login: {took_s:.2f} s")
    assert await page.value("document.cookie") == ""  # no script can read the session


async def open_job(page: Page) -> None:
    await page.click("tr[data-job$='/up']")
    await page.wait("document.querySelector('h1')?.textContent === 'up'")
    await page.wait("document.querySelector('.log').textContent.includes('step')", 240)
    await page.wait("document.querySelector('.curves .uplot canvas') !== null", 120)
    await page.wait("document.body.innerText.includes('rollout ')")
    await page.wait("document.querySelector('tr[data-trajectory]') !== null", 120)
    await page.click("tr[data-trajectory]")
    await page.wait("document.querySelectorAll('.conversation span[title]').length > 0")
    await page.wait("document.querySelector('.legend .key.unlikely') !== null")
    said = "document.querySelector('.conversation').textContent"
    assert await page.value(f"/[0-9]/.test({said})")  # digits: tokens have their text


async def stop_and_resume(page: Page) -> None:
    await page.press("Stop")
    await page.wait("document.querySelector('.jobhead .pill.stopped') !== null", 120)
    await page.press("Resume")
    await page.wait("document.querySelector('.jobhead .pill.stopped') === null", 120)
    await page.wait("[...document.querySelectorAll('button')].some(b => b.textContent === 'Stop')")


async def ask_the_planner(page: Page, tmp_path: Path) -> None:
    await page.click("nav a[data-view='what-if']")
    await page.press("One more rollout node")
    await page.wait("document.body.innerText.includes('jobs that have a place')", 290)
    await picture(page, "what-if", tmp_path)


async def look_again(page: Page, tmp_path: Path) -> None:
    """Back to the fleet, and to the job; for the manual once there is something to show."""
    await page.click("nav a[data-view='fleet']")
    if "SLACKWATER_PICTURES" in os.environ:
        await page.wait("/([3-9]\\d|\\d\\d\\d) switches/.test(document.body.innerText)", 700)
    await drawn(page, "canvas.lanes", 4)
    await picture(page, "fleet", tmp_path)
    await open_job(page)
    await picture(page, "conversation", tmp_path, ".conversation")
    await picture(page, "job", tmp_path)


async def cpu_share_of_a_viewer(service: ServiceProcess) -> float:
    """Processor time of the idle control plane with viewers, less that without, of one of them."""
    login = {"key": service.key}
    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(service.url, cookie_jar=jar) as browser:
        async with browser.post("/dashboard/api/login", json=login) as answer:
            assert answer.status == 200
        assert service.process is not None
        pid = service.process.pid
        await spent_s(pid)  # what the jobs left is tidied up
        idle_s = await spent_s(pid)
        watching = [asyncio.create_task(watch(browser)) for _ in range(VIEWERS)]
        watched_s = await spent_s(pid)
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        idle_s = min(idle_s, await spent_s(pid))
    print(f"in {MEASURED_S:.0f} s: idle {idle_s:.2f} s, with {VIEWERS} viewers {watched_s:.2f} s")
    return (watched_s - idle_s) / MEASURED_S / VIEWERS


async def spent_s(pid: int) -> float:
    """Processor time of the process from now on."""
    before_s = cpu_s(pid)
    await asyncio.sleep(MEASURED_S)
    return cpu_s(pid) - before_s


async def watch(browser: aiohttp.ClientSession) -> None:
    """What an open page asks for: the figures of every second, and the window now and then."""

    async def read_events() -> None:
        async with browser.get("/dashboard/api/events") as answer:
            async for _ in answer.content.iter_any():
                pass

    reading = asyncio.create_task(read_events())
    try:
        while True:
            async with browser.get("/dashboard/api/timeline?start=0&end=120&width=2400") as answer:
                await answer.read()
            await asyncio.sleep(1.5)
    finally:
        reading.cancel()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def recording_shown(trace: Path) -> Iterator[str]:
    """The address that `slackwater dashboard RUN` prints, while it runs."""
    command = [sys.executable, "-m", "slackwater", "dashboard", str(trace), "--print"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def test_a_recorded_run_of_a_hundred_jobs_on_a_thousand_devices(tmp_path: Path) -> None:
    with recording_shown(write_recording(tmp_path / "hundred-jobs.json")) as url:
        asyncio.run(look_at_recording(url, tmp_path))


def test_a_script_in_a_jobs_name_is_only_text(tmp_path: Path) -> None:
    """A trace may come from anybody: unlike a service's jobs, its names are not checked."""
    name = "<img src=none onerror=window.ran=1><script>window.ran=1</script>"

    async def look(url: str) -> None:
        async with Chromium() as page:
            await page.first_view_s(url)
            assert name in await page.value("document.querySelector('tr[data-job]').innerText")
            await page.click("tr[data-job]")
            await page.wait("document.querySelector('h1')?.textContent.startsWith('<img')")
            assert await page.value("document.querySelector('img[src=none]')") is None
            assert await page.value("window.ran") is None
            assert own_errors(page) == []

    with recording_shown(write_recording(tmp_path / "run.json", groups=1, name=name)) as url:
        asyncio.run(look(url))


async def look_at_recording(url: str, tmp_path: Path) -> None:
    async with Chromium() as page:
        took_s = await page.first_view_s(url)
        print(f"first view of a recording: {took_s:.2f} s")
        assert took_s <= within(FIRST_VIEW_S)
        assert await page.value(ROWS) == 100
        assert "key" not in await page.value("location.href")
        await page.wait("document.querySelector('.tools .note').textContent.includes('1000 lanes')")
        await drawn(page, "canvas.lanes", 6)
        await drawn(page, "canvas.map", 3)
        colored = "i => i.style.background && i.style.background !== 'transparent'"
        await page.wait(f"[...document.querySelectorAll('.job i')].some({colored})")
        await picture(page, "recording", tmp_path)
        await zoomed(page)
        await smooth(page)
        await page.click("tr[data-job$='agent-007']")
        await page.wait("document.querySelector('h1')?.textContent === 'agent-007'")
        await page.wait("document.body.innerText.includes('train ')")
        await page.click("nav a[data-view='what-if']")
        await page.wait("document.querySelector('.presets') !== null")
        assert own_errors(page) == []


def test_a_live_fleet_of_a_hundred_jobs_keeps_what_a_person_scrolled_to(tmp_path: Path) -> None:
    source = LiveFleet(write_recording(tmp_path / "fleet.json"))
    server = Server(source)
    try:
        asyncio.run(scroll_and_wait(f"{server.url}/dashboard#key={source.key}"))
    finally:
        server.stop()


async def scroll_and_wait(url: str) -> None:
    async with Chromium() as page:
        print(f"first view of a live fleet of 1,000 devices: {await page.first_view_s(url):.2f} s")
        await page.value("document.querySelector('.scroll').scrollTop = 900")
        await page.value("document.querySelectorAll('tr[data-job]')[30].focus({preventScroll: 1})")
        for _ in range(3):  # figures of another second have replaced every row
            await page.value("document.querySelector('tr[data-job]').dataset.old = ''")
            await page.wait("document.querySelector('tr[data-job]').dataset.old === undefined")
        assert await page.value("document.querySelector('.scroll').scrollTop") == 900
        focused = "[...document.querySelectorAll('tr[data-job]')].indexOf(document.activeElement)"
        assert await page.value(focused) == 30
        await smooth(page)
        assert own_errors(page) == []


async def smooth(page: Page) -> None:
    """Zooming and panning: time between frames, and what each costs the page's thread."""
    left, top, width, height = await page.place("canvas.lanes")
    x, y = left + width / 2, top + height / 2

    async def zoom_and_pan() -> None:
        for turn in range(6):
            for _ in range(5):
                await page.wheel(x, y, 60 if turn % 2 else -60)
            await page.drag(x, y, x - 90, y + 60)
            await page.drag(x, y, x + 90, y - 60)

    before_s = await page.main_thread_s()
    frames_ms = sorted(await page.frames_ms(zoom_and_pan))
    each_s = (await page.main_thread_s() - before_s) / len(frames_ms)
    middle_ms, slow_ms = (frames_ms[int(share * len(frames_ms))] for share in (0.5, 0.95))
    print(
        f"{len(frames_ms)} frames while zooming and panning: {middle_ms:.0f} ms from one to the "
        f"next, 95 % within {slow_ms:.0f} ms; {1000 * each_s:.1f} ms of processor time each"
    )
    assert each_s <= FRAME_S
