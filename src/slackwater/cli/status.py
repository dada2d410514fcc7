"""`slackwater status`: what the service of a state directory is doing."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from slackwater.cli.up import DEFAULT_STATE
from slackwater.model.errors import UnavailableError

app = typer.Typer(add_completion=False)
_SHOWN_MINUTES = 5


@app.command()
def status(
    state: Annotated[Path, typer.Option(help="The service's folder.")] = DEFAULT_STATE,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Whether it runs, its workers, models and what waits. Exit 0 if it runs, 1 if not."""
    from slackwater.runtime.store.state_directory import StateDirectory

    folder = StateDirectory(state)
    server = folder.read_server()
    if not folder.is_locked() or server is None:
        shown: dict[str, Any] = {"running": False, "state": str(folder.root)}
        print(json.dumps(shown) if as_json else f"no service is running on {folder.root}")
        return 1
    found = {"running": True, "url": server["url"], "pid": server["pid"], **_ask(server)}
    if as_json:
        print(json.dumps(found))
    else:
        _print(found)
    return 0


def _ask(server: dict[str, Any]) -> dict[str, Any]:
    import httpx

    try:
        answer = httpx.get(
            f"{server['url']}/slackwater/status", headers={"x-api-key": server["key"]}, timeout=10
        )
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise UnavailableError(f"{server['url']} does not answer: {error}") from None
    said: dict[str, Any] = answer.json()
    return said


def _serving_rows(serving: dict[str, Any] | None) -> list[tuple[str, str]]:
    """The promise, who has devices of the service, and the last minutes."""
    if serving is None:
        return []
    slo = serving["slo"]
    promise = f"TTFT {slo['ttft_s']:g} s, TPOT {slo['tpot_s']:g} s for {slo['share']:.0%}"
    rows = [("serves", f"{serving['model']}   {promise}")]
    rows += [("lent", f"{worker}   to {job}") for worker, job in serving["lent"].items()]
    rows += [("not lent", f"{worker}   {why}") for worker, why in serving["not_lent"].items()]
    for minute in serving["minutes"][-_SHOWN_MINUTES:]:
        said = (
            f"{minute['attainment']:.1%} of {minute['requests']:.0f} requests kept,"
            f" p99 TTFT {minute['ttft_p99_s']:.3f} s, TPOT {minute['tpot_p99_s']:.3f} s"
        )
        rows.append((f"minute {minute['minute']:.0f}", said))
    return rows


def _print(found: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    print(f"{found['url']} (pid {found['pid']})")
    table = Table(box=box.SIMPLE, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, directory in found["models"].items():
        table.add_row("model", f"{name}   {directory}")
    for names in found["workers"].values():
        for name in names:
            table.add_row("worker", f"{name}   pid {found['pids'].get(name, '-')}")
    for name, error in found.get("failed", {}).items():
        table.add_row("failed", f"{name}   {error}")
    for name, text in _serving_rows(found.get("serving")):
        table.add_row(name, text)
    for name, value in found["gauges"].items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    Console().print(table)
