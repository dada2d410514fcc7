"""`slackwater status`: what the service of a state directory is doing."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from slackwater.cli.up_options import DEFAULT_STATE
from slackwater.model.errors import UnavailableError

app = typer.Typer(add_completion=False)


@app.command()
def status(
    state: Annotated[Path, typer.Option(help="The service's folder.")] = DEFAULT_STATE,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """What is wrong, then models, workers, nodes, jobs, queues. Exit 0 if it runs, 1 if not."""
    from slackwater.runtime.store.state_directory import StateDirectory

    folder = StateDirectory(state)
    server = folder.read_server()
    if not folder.is_locked() or server is None:
        shown: dict[str, Any] = {"running": False, "state": str(folder.root)}
        print(json.dumps(shown) if as_json else f"no service is running on {folder.root}")
        return 1
    found = {"running": True, "url": server["url"], "pid": server["pid"], **ask_status(server)}
    if as_json:
        print(json.dumps(found))
    else:
        from rich.console import Console

        from slackwater.cli.status_screen import status_screen

        Console().print(status_screen(found), highlight=False)
    return 0


def ask_status(server: dict[str, Any]) -> dict[str, Any]:
    """What a running service says of itself to the operator."""
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
