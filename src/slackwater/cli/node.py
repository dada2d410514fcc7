"""`slackwater node`: lists the machines of a fleet, and makes tokens for new ones."""

import json
from pathlib import Path
from typing import Annotated

import typer

from slackwater.cli.running_service import AsJson, State, ask_service, describe_absence
from slackwater.cli.up_options import DEFAULT_STATE
from slackwater.model.errors import UnavailableError

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Machines of a fleet.")


_COLUMNS = ("node", "pool", "state", "host", "cores", "memory_mb", "here_s", "workers")
_DEVICE_COLUMNS = ("device", "memory_mb", "domain", "owners")


@app.command("list")
def list_nodes(state: State = DEFAULT_STATE, as_json: AsJson = False) -> None:
    """List nodes: whether they have joined, their workers and devices."""
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
    devices = Table(*_DEVICE_COLUMNS, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for device in (each for row in found["nodes"] for each in row.get("devices", [])):
        shown = device | {"owners": ", ".join(device["owners"])}
        devices.add_row(*(str(shown[column]) for column in _DEVICE_COLUMNS))
    Console().print(table, devices)


@app.command()
def token(
    node: Annotated[str, typer.Argument(help="Name of the machine in the fleet.")],
    pool: Annotated[
        str | None, typer.Option(help="Pool of the node, unless the fleet file lists it.")
    ] = None,
    state: State = DEFAULT_STATE,
) -> None:
    """Print NODE's secret join token, for `agent --join-file FILE`."""
    print(node_token(state, node, pool))


def node_token(state: Path, node: str, pool: str | None) -> str:
    """The token with which a machine joins the running service as this node of this pool."""
    from slackwater.model.config import decode
    from slackwater.model.toml_text import read_toml
    from slackwater.runtime.launch.fleet_file import FleetFile, check_name
    from slackwater.runtime.launch.node_keys import NodeKeys
    from slackwater.runtime.store.state_directory import StateDirectory
    from slackwater.wire.join_token import write_token

    check_name("node", node)
    folder = StateDirectory(state, make=False)
    server = folder.read_server()
    if server is None or not folder.is_locked():
        fix = "start one with `slackwater up --fleet FILE`"
        raise UnavailableError(describe_absence(folder, fix))
    written = folder.root / "config.toml"
    table = read_toml("config.toml", written) if written.is_file() else {}
    if "fleet" in table:
        decode(FleetFile, table["fleet"], "fleet").pool_of(node, pool)
    own = {"node": node, "pool": pool, "key": NodeKeys(folder).key(node, pool)}
    return write_token(server["join"] | own)


@app.command()
def revoke(
    node: Annotated[str, typer.Argument(help="Name of a node.")], state: State = DEFAULT_STATE
) -> None:
    """Revoke NODE's tokens and disconnect it."""
    from slackwater.runtime.launch.fleet_file import check_name
    from slackwater.runtime.launch.node_keys import NodeKeys
    from slackwater.runtime.store.state_directory import StateDirectory

    check_name("node", node)
    folder = StateDirectory(state)
    if folder.is_locked():
        ask_service(state, "POST", f"/slackwater/nodes/{node}/revoke")
    else:
        NodeKeys(folder).revoke(node)
    print(f"node {node}: tokens revoked")
