"""`slackwater status`: what the service of a state directory is doing."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from slackwater.cli.up import DEFAULT_STATE
from slackwater.model.errors import UnavailableError

app = typer.Typer(add_completion=False)


@app.command()
def status(
    state: Annotated[Path, typer.Option(help="The service's folder.")] = DEFAULT_STATE,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Whether it runs, its workers, models and what waits. Exit 0 if it runs, 1 if not."""
    from slackwater.runtime.state_directory import StateDirectory

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


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "value", title=f"{found['url']} (pid {found['pid']})")
    for key, value in found.items():
        if key not in ("running", "url", "pid"):
            table.add_row(key, value if isinstance(value, str) else json.dumps(value))
    Console().print(table)
