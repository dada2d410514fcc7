"""`slackwater action`: run commands through the action service and watch them."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from slackwater.cli.running_service import (
    AsJson,
    Key,
    ServiceClient,
    State,
    Url,
    find_service,
    read_key,
)
from slackwater.cli.up_options import DEFAULT_STATE
from slackwater.model.errors import ConfigError, UnavailableError

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def root() -> None:
    """Run commands in the service's sandboxes, and see what runs."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    command: Annotated[
        list[str],
        typer.Argument(help="The command, after --; {cores} stands for the number of cores."),
    ],
    cores: Annotated[
        str, typer.Option(help="Cores, or choices such as 1,2,4 for an elastic action.")
    ] = "1",
    environment: Annotated[
        str | None, typer.Option(help="Environment to run in. Default: none.")
    ] = None,
    limit_s: Annotated[float, typer.Option(help="Time limit of the command, in seconds.")] = 600.0,
    deadline_s: Annotated[
        float | None, typer.Option(help="Deadline in seconds, including the wait for cores.")
    ] = None,
    priority: Annotated[int, typer.Option(help="Higher runs first.")] = 0,
    job: Annotated[str, typer.Option(help="Job that the action is charged to.")] = "cli",
    network: Annotated[
        bool, typer.Option("--network", help="Allow the addresses that the operator permits.")
    ] = False,
    output_bytes: Annotated[int, typer.Option(help="Limit of the output, in bytes.")] = 16 << 20,
    as_json: AsJson = False,
    state: State = DEFAULT_STATE,
    url: Url = None,
    key: Key = None,
) -> int:
    """Run a command, stream its output, and exit with its status."""
    body: dict[str, Any] = {
        "command": command,
        "cores": _choices(cores),
        "environment": environment,
        "limit_s": limit_s,
        "deadline_s": deadline_s,
        "priority": priority,
        "job": job,
        "limits": {"network": network, "output_bytes": output_bytes},
        "stream": True,
    }
    client = _client(url, key, state)
    submitted = client.ask("POST", "/slackwater/actions", body)
    result = _follow_action(client, str(submitted["action"]), quiet=as_json)
    if as_json:
        print(json.dumps(result))
    elif result["outcome"] != "done":
        print(f"slackwater: {result['outcome']}: {result['reason']}", file=sys.stderr)
    status = result["status"]
    if result["outcome"] != "done" or status is None:
        return 1
    return int(status) if status >= 0 else 128 - int(status)


def _follow_action(client: ServiceClient, action: str, quiet: bool) -> dict[str, Any]:
    """Stream an action's output until it ends and return its result; Ctrl-C cancels it."""
    try:
        path = f"/slackwater/actions/{action}/output"
        with client.http.stream("GET", path, timeout=None) as lines:
            for line in lines.iter_lines():
                piece = json.loads(line)
                if "stream" in piece and not quiet:
                    target = sys.stdout if piece["stream"] == "stdout" else sys.stderr
                    print(piece["data"], end="", file=target, flush=True)
    except KeyboardInterrupt:
        client.send("POST", f"/slackwater/actions/{action}/cancel")
        raise
    while True:
        found = client.ask("GET", f"/slackwater/actions/{action}?wait_s=20")
        if found["state"] == "ended":
            return found


@app.command()
def mcp(
    job: Annotated[str, typer.Option(help="Job that the action is charged to.")] = "mcp",
    memory_mib: Annotated[int, typer.Option(help="Memory of the environment, in MiB.")] = 1024,
    state: State = DEFAULT_STATE,
    url: Url = None,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the key that `slackwater up` printed.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(envvar="TINKER_API_KEY", hidden=True, help="By environment only.")
    ] = None,
) -> None:
    """Serve a sandbox environment as MCP tools on stdin and stdout."""
    import asyncio

    known = read_key(key, key_file)
    try:
        from slackwater.cli.action_mcp import serve
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("mcp"):
            raise
        raise UnavailableError(
            "the mcp package is missing: pip install 'slackwater[mcp]'"
        ) from None
    asyncio.run(serve(*find_service(url, known, state), job, memory_mib))


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Print once and stop.")] = False,
    as_json: AsJson = False,
    every_s: Annotated[float, typer.Option(help="Seconds between refreshes.")] = 1.0,
    state: State = DEFAULT_STATE,
    url: Url = None,
    key: Key = None,
) -> None:
    """Show running, waiting and recent actions."""
    client = _client(url, key, state)
    found = client.ask("GET", "/slackwater/actions")
    if as_json:
        print(json.dumps(found))
        return
    if once or not sys.stdout.isatty():
        from rich.console import Console

        Console().print(_table(found))
        return
    from rich.live import Live

    with Live(_table(found), screen=False, refresh_per_second=4) as live:
        while True:
            time.sleep(every_s)
            live.update(_table(client.ask("GET", "/slackwater/actions")))


def _table(found: dict[str, Any]) -> Any:
    from rich.console import Group
    from rich.table import Table

    gauges = found["gauges"]
    nodes = ", ".join(
        f"{node['node']} ({node['cores']} cores, {node['backend']})" for node in found["nodes"]
    )
    line = (
        f"{gauges['actions_running']:g} running, {gauges['actions_waiting']:g} waiting, "
        f"{gauges['environments']:g} environments on {nodes or 'no sandbox'}"
    )
    live = Table("action", "job", "state", "cores", "age s", "command", title="under way")
    for row in found["live"]:
        cells = (row["state"], str(row["cores"]), f"{row['age_s']:.1f}")
        live.add_row(row["action"], row["job"], *cells, row["command"])
    result = Table("action", "job", "outcome", "queued s", "ran s", "command", title="ended")
    for row in reversed(found["ended"][-10:]):
        cells = (row["kind"], f"{row['queued_s']:.3f}", f"{row['ran_s']:.3f}")
        result.add_row(row["action"], row["job"], *cells, row["command"])
    return Group(line, live, result)


def _choices(text: str) -> int | list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError.of(
            "--cores", text, "must be a number, or numbers separated by commas"
        ) from None
    return found[0] if len(found) == 1 else found


def _client(url: str | None, key: str | None, state: Path) -> ServiceClient:
    return ServiceClient(*find_service(url, key, state), timeout_s=40)
