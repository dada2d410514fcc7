"""A headless Chromium, driven as a person would: over the DevTools protocol, with real input."""

import asyncio
import base64
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

_WAIT_S = 60.0
_LOOK_S = 0.05
_STEPS = 10  # of a drag

# Notes when jobs are listed and lanes are painted, on the page's own clock: zero is the navigation.
_NOTE_FIRST_VIEW = """(() => {
  const drawn = () => /[1-9]\\d* lanes/.test(document.querySelector('.tools .note')?.textContent)
    && document.querySelector('tr[data-job]');
  const look = () => { if (drawn()) window.firstView_ms = performance.now();
    else requestAnimationFrame(look); };
  requestAnimationFrame(look);
})()"""
_NOTE_FRAMES = """(() => {
  const frames_ms = window.frames_ms = [];
  const tick = (now) => {
    if (window.frames_ms === frames_ms) { frames_ms.push(now); requestAnimationFrame(tick); }
  };
  requestAnimationFrame(tick);
})()"""


def find_chromium() -> str | None:
    """The browser of the machine: `$CHROMIUM`, else one on the path."""
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)


class Page:
    """One tab. Everything that waits has a deadline."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            else:
                self._note(said["method"], said.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description", details)))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.hosts.add(params["request"]["url"].partition("://")[2].partition("/")[0])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": params}))
        said = await asyncio.wait_for(answer, _WAIT_S)
        assert "error" not in said, f"{method}: {said}"
        found: dict[str, Any] = said["result"]
        return found

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def first_view_s(self, url: str) -> float:
        """From the navigation until the fleet is drawn: its jobs and its lanes."""
        await self.open("about:blank")
        added = await self.call("Page.addScriptToEvaluateOnNewDocument", source=_NOTE_FIRST_VIEW)
        await self.open(url)
        await self.wait("window.firstView_ms !== undefined")
        await self.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])
        found_ms: float = await self.value("window.firstView_ms")
        return found_ms / 1000

    async def main_thread_s(self) -> float:
        """Processor time that the page's thread has spent so far."""
        found = await self.call("Performance.getMetrics")
        named = {one["name"]: one["value"] for one in found["metrics"]}
        return float(named["TaskDuration"])

    async def frames_ms(self, act: Callable[[], Awaitable[None]]) -> list[float]:
        """The time from each frame to the next while that is done."""
        await self.value(_NOTE_FRAMES)
        await act()
        at_ms: list[float] = await self.value("window.frames_ms")
        return [after - before for before, after in itertools.pairwise(at_ms)]

    async def value(self, expression: str) -> Any:
        """What an expression is, on the page."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def wait(self, expression: str, limit_s: float = _WAIT_S) -> float:
        """Until it is true; how long that took."""
        began_s = time.monotonic()
        while not await self.value(expression):
            if time.monotonic() - began_s > limit_s:
                text = await self.value("document.body.innerText.slice(0, 3000)")
                raise AssertionError(f"not within {limit_s} s: {expression}\n{text}\n{self.errors}")
            await asyncio.sleep(_LOOK_S)
        return time.monotonic() - began_s

    async def place(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element, scrolled into view."""
        await self.wait(f"document.querySelector({json.dumps(selector)}) !== null")
        x, y, width, height = await self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.left, r.top, r.width, r.height]; })()"
        )
        return x, y, width, height

    async def click(self, selector: str) -> None:
        left, top, width, height = await self.place(selector)
        await self.click_at(left + width / 2, top + height / 2)

    async def click_at(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )

    async def press(self, text: str) -> None:
        """The button that says so."""
        found = f"[...document.querySelectorAll('button')].find(b => b.textContent === {text!r})"
        await self.wait(f"({found}) !== undefined")
        await self.value(f"({found}).setAttribute('data-pressed', {text!r})")
        await self.click(f"button[data-pressed={text!r}]")

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def move(self, x: float, y: float) -> None:
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def wheel(self, x: float, y: float, by: float) -> None:
        await self.call(
            "Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by
        )

    async def drag(self, x: float, y: float, to_x: float, to_y: float) -> None:
        mouse = "Input.dispatchMouseEvent"
        await self.call(mouse, type="mousePressed", x=x, y=y, button="left", clickCount=1)
        for part in range(1, _STEPS + 1):
            share = part / _STEPS
            at = {"x": x + (to_x - x) * share, "y": y + (to_y - y) * share}
            await self.call(mouse, type="mouseMoved", button="left", buttons=1, **at)
        await self.call(mouse, type="mouseReleased", x=to_x, y=to_y, button="left", clickCount=1)

    async def picture(self, file: Path) -> None:
        found = await self.call("Page.captureScreenshot", format="png")
        _write(file, base64.b64decode(found["data"]))


class Chromium:
    """`async with Chromium() as page`: a new profile, a window of 1440 by 1000."""

    async def __aenter__(self) -> Page:
        binary = find_chromium()
        assert binary is not None
        self._folder = tempfile.TemporaryDirectory(prefix="slackwater-browser-")
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        quiet = ["--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage"]
        self._process = await asyncio.create_subprocess_exec(
            *(binary, *flags, *quiet, f"--user-data-dir={self._folder.name}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        port = await self._port()
        self._http = aiohttp.ClientSession()
        url = f"http://127.0.0.1:{port}/json"
        async with self._http.get(url) as answer:
            tabs = await answer.json()
        tab = next(tab for tab in tabs if tab["type"] == "page")
        self._socket = await self._http.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0)
        page = Page(self._socket)
        for part in ("Page", "Runtime", "Log", "Network"):
            await page.call(f"{part}.enable")
        await page.call("Performance.enable", timeDomain="threadTicks")
        shape = {"width": 1440, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        await page.call("Emulation.setDeviceMetricsOverride", **shape)
        features = [{"name": "prefers-color-scheme", "value": "dark"}]
        await page.call("Emulation.setEmulatedMedia", features=features)
        return page

    async def _port(self) -> str:
        file, deadline_s = (
            Path(self._folder.name) / "DevToolsActivePort",
            time.monotonic() + _WAIT_S,
        )
        while not file.exists() or not file.read_text().strip():
            assert time.monotonic() < deadline_s, "Chromium did not start"
            await asyncio.sleep(_LOOK_S)
        return file.read_text().splitlines()[0]

    async def __aexit__(self, *raised: object) -> None:
        await self._socket.close()
        await self._http.close()
        os.killpg(self._process.pid, 9)
        await asyncio.wait_for(self._process.wait(), 30)
        for _ in range(20):  # its last processes may still write there
            try:
                self._folder.cleanup()
            except OSError:
                await asyncio.sleep(_LOOK_S)


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
