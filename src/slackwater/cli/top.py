"""`slackwater top`: a live view of permits, utilization, slowdowns, jobs and instances."""

import json
import sys
import time
from typing import Annotated, Any

import typer

from slackwater.cli.running_service import AsJson, ServiceClient, State, find_service
from slackwater.cli.up_options import DEFAULT_STATE
from slackwater.model.errors import RefusedError

app = typer.Typer(add_completion=False)

# The parts of a frame and their paths.
_PARTS = {
    "status": "/slackwater/status",
    "jobs": "/slackwater/jobs",
    "instances": "/slackwater/instances",
    "nodes": "/slackwater/nodes",
}
_SHARED = "/slackwater/coschedule"


@app.command()
def top(
    state: State = DEFAULT_STATE,
    every_s: Annotated[float, typer.Option("--every", min=0.2, help="Seconds per frame.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and stop.")] = False,
    as_json: AsJson = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also show jobs that have ended.")
    ] = False,
) -> int:
    """Watch which job holds which node, and every job's progress and slowdown."""
    source = FrameSource(*find_service(None, None, state, or_by_url=False))
    if as_json:
        print(json.dumps(source.take()))
        return 0
    from rich.console import Console

    from slackwater.cli.top_frame import draw

    console = Console()
    if once or not sys.stdout.isatty():
        console.print(draw(source.take(), console.width, everything=everything))
        return 0
    from rich.live import Live

    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                drawn = draw(source.take(), console.width, console.height, everything=everything)
                live.update(drawn, refresh=True)
                time.sleep(every_s)
    except KeyboardInterrupt:
        return 0


class FrameSource:
    """Polls the service; keeps the last frame to compute rates."""

    def __init__(self, url: str, key: str) -> None:
        self._client = ServiceClient(url, key, timeout_s=10)
        self._before: tuple[float, float] | None = None

    def take(self) -> dict[str, Any]:
        """One frame, as plain data."""
        frame: dict[str, Any] = {"url": self._client.url, "at_s": time.time()}
        for name, path in _PARTS.items():
            found = self._client.ask("GET", path)
            frame[name] = found if name == "status" else found[name]
        try:
            frame["shared"] = self._client.ask("GET", _SHARED)
        except RefusedError:
            frame["shared"] = None  # this service has no co-scheduler
        tokens, now_s = float(sum(row["tokens"] for row in frame["jobs"])), time.monotonic()
        if self._before is not None and now_s > self._before[0]:
            frame["tokens_per_s"] = max(tokens - self._before[1], 0) / (now_s - self._before[0])
        self._before = (now_s, tokens)
        return frame
