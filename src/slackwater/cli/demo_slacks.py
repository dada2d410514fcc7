"""`slackwater demo --slacks`: jobs beside a served model under load; savings by kind of slack."""

import json
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slackwater.cli.demo_run import DemoRun
from slackwater.cli.running_service import ServiceClient
from slackwater.model.errors import SlackwaterError, UnavailableError

CHAT = "chat"
TTFT_S, TPOT_S = 5.0, 1.0
_PROMPTS = [[10 + number, 40, 30 + number, 20] for number in range(6)]
_TOKENS = 24


def slack_options(run: Path, chat: Path) -> list[str]:
    """Options of the service: a rollout and a train node on two sites, sandboxes, and a served
    model that lends its device. Engines run one turn at a time, so that other turns use the loans.
    Events are recorded in the run's folder.
    """
    fleet = run / "fleet.toml"
    fleet.write_text(
        '[[pools]]\nname = "rollout"\nengines = 1\n'
        '[[pools]]\nname = "train"\nengines = 0\ntrainers = 1\nsandboxes = 1\n'
        + "".join(
            f'[[nodes]]\nname = "{name}"\npool = "{pool}"\nsite = "{pool}"\n'
            f"directory = {json.dumps(str((run / name).absolute()))}\n"
            for name, pool in (("r0", "rollout"), ("t0", "train"))
        )
    )
    served = ["--serve", f"{CHAT}={chat}", "--slo", f"ttft={TTFT_S:g},tpot={TPOT_S:g}", "--lend"]
    prices = {"device_per_h": 2.0, "spot_device_per_h": 0.7, "core_per_h": 0.05}
    sets = [f"prices.{name}={price}" for name, price in prices.items()]
    sets.append("coschedule.placement=group")
    return [
        *("--fleet", str(fleet), *served, "--kv-mb", "64", "--max-running", "1"),
        *("--record", str(run / "events")),
        *(part for assignment in sets for part in ("--set", assignment)),
    ]


class ServedLoad:
    """A user of the served model who repeats the same questions, one at a time."""

    def __init__(self, url: str, key: str, pause_s: float = 0.5) -> None:
        self._pause_s = pause_s
        self._client = ServiceClient(url, key, timeout_s=120)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask_repeatedly, daemon=True)
        self.alone: list[str] = []
        self.alone_s: list[float] = []
        self.took_s: list[float] = []
        self.different = self.failed = 0

    def begin(self) -> None:
        """Record every answer on the idle service, then keep asking in a thread."""
        for prompt in _PROMPTS:
            began_s = time.monotonic()
            self.alone.append(self._ask(prompt))
            self.alone_s.append(time.monotonic() - began_s)
        self._thread.start()

    def end(self) -> dict[str, Any]:
        self._stop.set()
        self._thread.join(120)
        requests = len(self.took_s) + self.failed
        return {
            "requests": requests,
            "failed": self.failed,
            "different_answers": self.different,
            "attainment": _within_slo(self.took_s) / max(requests, 1),
            "attainment_alone": _within_slo(self.alone_s) / max(len(self.alone_s), 1),
            "median_s": statistics.median(self.took_s) if self.took_s else None,
        }

    def _ask(self, prompt: Sequence[int]) -> str:
        asked = {"model": CHAT, "prompt": list(prompt), "max_tokens": _TOKENS, "temperature": 0}
        answer = self._client.ask("POST", "/v1/completions", {**asked, "ignore_eos": True})
        return str(answer["choices"][0]["text"])

    def _ask_repeatedly(self) -> None:
        number = 0
        while not self._stop.wait(self._pause_s):
            place, number = number % len(_PROMPTS), number + 1
            began_s = time.monotonic()
            try:
                self.different += self._ask(_PROMPTS[place]) != self.alone[place]
            except SlackwaterError:
                self.failed += 1
            else:
                self.took_s.append(time.monotonic() - began_s)


def _within_slo(took_s: Sequence[float]) -> int:
    return sum(each_s <= TTFT_S + TPOT_S * (_TOKENS - 1) for each_s in took_s)


def slack_demo(
    url: str,
    key: str,
    run: Path,
    files: Sequence[dict[str, Any]],
    alone: int | None,
    *,
    quiet: bool,
) -> dict[str, Any]:
    """The demo's figures, those of the served model, and what each kind of slack gave."""
    demo, load = DemoRun(url, key, run, quiet=quiet), ServedLoad(url, key)
    demo.wait_for_workers()
    load.begin()
    try:
        result = demo.run(files, alone)
    finally:
        served = load.end()
    rows = slack_rows(url, key)
    seen = [row["kind"] for row in rows if row["alone"] > 0]
    return {**result, "served": served, "slack": rows, "kinds_seen": len(seen)}


def slack_rows(url: str, key: str) -> list[dict[str, Any]]:
    """The dashboard's rows, one per kind of slack."""
    with httpx.Client(base_url=url, timeout=60) as http:
        http.post("/dashboard/api/login", json={"key": key}).raise_for_status()
        with http.stream("GET", "/dashboard/api/events") as events:
            for line in events.iter_lines():
                if line.startswith("data: "):
                    rows: list[dict[str, Any]] = json.loads(line.removeprefix("data: "))["slack"]
                    return rows
    raise UnavailableError("the dashboard sent no figures")


def slack_table(result: dict[str, Any]) -> RenderableType:
    """One row per kind, then the effect on the served model's user and on the jobs."""
    rows, served = result["slack"], result["served"]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("slack", "without", "used", "unit", "$ saved", ""):
        text = name in ("slack", "unit", "")
        table.add_column(name, justify="left" if text else "right", no_wrap=name != "")
    for row in rows:
        saved = row["saved_dollars"]
        table.add_row(
            row["kind"],
            f"{row['alone']:.4f}",
            f"{row['used']:.4f}",
            row["unit"],
            "-" if saved is None else f"{saved:.4f}",
            row["detail"],
        )
    changed = [row["job"] for row in result["jobs"] if not row["same_rewards"]]
    curves = f"differ: {', '.join(changed)}" if changed else "are the same to the last digit"
    summary = (
        f"{result['kinds_seen']} of 5 kinds of slack; {served['requests']} requests for the served "
        f"model, {served['attainment']:.1%} within its SLO, {served['different_answers']} answered "
        f"otherwise than alone, {served['failed']} failed; rewards alone and together {curves}"
    )
    return Group(table, Text(summary))
