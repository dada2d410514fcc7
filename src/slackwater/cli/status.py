"""`slackwater status`: shows the state of the service of a state directory."""

import json
from typing import Any

import typer

from slackwater.cli.running_service import AsJson, ServiceClient, State, describe_absence
from slackwater.cli.up_options import DEFAULT_STATE

app = typer.Typer(add_completion=False)


@app.command()
def status(state: State = DEFAULT_STATE, as_json: AsJson = False) -> int:
    """Show problems, models, workers, nodes, jobs and queues; exit 1 if it is down."""
    from slackwater.runtime.store.state_directory import StateDirectory

    folder = StateDirectory(state, make=False)
    server = folder.read_server()
    if not folder.is_locked() or server is None:
        shown: dict[str, Any] = {"running": False, "state": str(folder.root)}
        print(json.dumps(shown) if as_json else describe_absence(folder))
        return 1
    found = {"running": True, "url": server["url"], "pid": server["pid"], **ask_status(server)}
    if as_json:
        print(json.dumps(found))
    else:
        from rich.console import Console

        from slackwater.cli.status_screen import status_screen

        Console().print(status_screen(found), highlight=False, crop=False)
    return 0


def ask_status(server: dict[str, Any]) -> dict[str, Any]:
    """The operator's view of a running service."""
    client = ServiceClient(server["url"], server["key"], timeout_s=10)
    return client.ask("GET", "/slackwater/status")
