"""`slackwater node`: the machines of a fleet, and how another one joins."""

import json
from pathlib import Path
from typing import Annotated

import typer

from slackwater.cli.agent import write_token
from slackwater.cli.running_service import ask_service
from slackwater.cli.up import DEFAULT_STATE
from slackwater.model.errors import UnavailableError

app = typer.Typer(add_completion=False, no_args_is_help=True)

State = Annotated[Path, typer.Option(help="The service's folder.")]

_COLUMNS = ("node", "pool", "state", "host", "cores", "memory_mb", "here_s", "workers")


@app.command("list")
def list_nodes(
    state: State = DEFAULT_STATE,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show every node, whether it is here, and what runs on it."""
    found = ask_service(state, "GET", "/slackwater/nodes")
    if as_json:
        print(json.dumps(found))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*_COLUMNS, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in found["nodes"]:
        shown = row | {"state": "here" if "host" in row else "away"}
        shown["workers"] = ", ".join(row["workers"])
        table.add_row(*(str(shown.get(column, "")) for column in _COLUMNS))
    Console().print(table)


@app.command()
def token(state: State = DEFAULT_STATE) -> None:
    """Print what another machine needs to join: `slackwater agent --join TOKEN`. It holds the fleet's secret."""
    from slackwater.runtime.store.state_directory import StateDirectory

    folder = StateDirectory(state)
    server = folder.read_server()
    if server is None or not folder.is_locked():
        raise UnavailableError(
            f"no service is running on {folder.root}; `slackwater up --fleet FILE` starts one"
        )
    print(write_token(server["join"]))
