"""`slackwater action`: run something through the action service, and see what it is doing."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from slackwater.cli.up_options import DEFAULT_STATE
from slackwater.model.errors import ConfigError, RefusedError, UnavailableError

app = typer.Typer(add_completion=False, no_args_is_help=True)

State = Annotated[Path, typer.Option(help="The service's folder.")]
Url = Annotated[str | None, typer.Option(envvar="TINKER_BASE_URL", help="The service's address.")]
Key = Annotated[str | None, typer.Option(envvar="TINKER_API_KEY", help="The key it printed.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback()
def root() -> None:
    """Actions: commands that the service runs in sandboxes, one atomic use of resources each."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    command: Annotated[list[str], typer.Argument(help="After --; {cores} becomes their number.")],
    cores: Annotated[
        str, typer.Option(help="How many: a number, or choices such as 1,2,4 for an elastic one.")
    ] = "1",
    environment: Annotated[str | None, typer.Option(help="Run in this environment.")] = None,
    limit_s: Annotated[float, typer.Option(help="It may run so long.")] = 600.0,
    deadline_s: Annotated[float | None, typer.Option(help="It must have ended by then.")] = None,
    priority: Annotated[int, typer.Option(help="More goes first.")] = 0,
    job: Annotated[str, typer.Option(help="Whose it is.")] = "cli",
    network: Annotated[
        bool, typer.Option("--network", help="Grant the addresses that the operator allows.")
    ] = False,
    output_bytes: Annotated[int, typer.Option(help="It may print so much.")] = 16 << 20,
    as_json: AsJson = False,
    state: State = DEFAULT_STATE,
    url: Url = None,
    key: Key = None,
) -> int:
    """Run a command and print what it prints, as it comes; exits as the command does."""
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
    with _client(url, key, state) as client:
        asked = _said(client.post("/slackwater/actions", json=body))
        ended = _followed(client, str(asked["action"]), quiet=as_json)
    if as_json:
        print(json.dumps(ended))
    elif ended["outcome"] != "done":
        print(f"slackwater: {ended['outcome']}: {ended['reason']}", file=sys.stderr)
    status = ended["status"]
    if ended["outcome"] != "done" or status is None:
        return 1
    return int(status) if status >= 0 else 128 - int(status)


def _followed(client: Any, action: str, quiet: bool) -> dict[str, Any]:
    """Print what it prints until it ends; its outcome. Ctrl-C cancels it."""
    try:
        with client.stream("GET", f"/slackwater/actions/{action}/output", timeout=None) as lines:
            for line in lines.iter_lines():
                piece = json.loads(line)
                if "stream" in piece and not quiet:
                    to = sys.stdout if piece["stream"] == "stdout" else sys.stderr
                    print(piece["data"], end="", file=to, flush=True)
    except KeyboardInterrupt:
        client.post(f"/slackwater/actions/{action}/cancel")
        raise
    while True:
        answer = client.get(f"/slackwater/actions/{action}", params={"wait_s": 20})
        if answer.status_code != 202:
            return _said(answer)


@app.command()
def mcp(
    job: Annotated[str, typer.Option(help="Whose it is.")] = "mcp",
    memory_mib: Annotated[int, typer.Option(help="Memory of its environment.")] = 1024,
    state: State = DEFAULT_STATE,
    url: Url = None,
    key_file: Annotated[Path | None, typer.Option(help="File with the key it printed.")] = None,
    key: Annotated[
        str | None, typer.Option(envvar="TINKER_API_KEY", hidden=True, help="By environment only.")
    ] = None,
) -> None:
    """Give an agent a sandbox: one environment's tools over MCP on standard input and output."""
    import asyncio

    from slackwater.cli.running_service import find_service, read_key

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
    every_s: Annotated[float, typer.Option(help="Look so often.")] = 1.0,
    state: State = DEFAULT_STATE,
    url: Url = None,
    key: Key = None,
) -> None:
    """What runs, what waits and what ended last."""
    with _client(url, key, state) as client:
        found = _said(client.get("/slackwater/actions"))
        if as_json:
            print(json.dumps(found))
            return
        if once or not sys.stdout.isatty():
            _console().print(_table(found))
            return
        from rich.live import Live

        with Live(_table(found), screen=False, refresh_per_second=4) as live:
            while True:
                time.sleep(every_s)
                live.update(_table(_said(client.get("/slackwater/actions"))))


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
        live.add_row(
            row["action"], row["job"], row["state"], str(row["cores"]), f"{row['age_s']:.1f}",
            row["command"],
        )  # fmt: skip
    ended = Table("action", "job", "outcome", "queued s", "ran s", "command", title="ended")
    for row in reversed(found["ended"][-10:]):
        ended.add_row(
            row["action"], row["job"], row["kind"], f"{row['queued_s']:.3f}",
            f"{row['ran_s']:.3f}", row["command"],
        )  # fmt: skip
    return Group(line, live, ended)


def _console() -> Any:
    from rich.console import Console

    return Console()


def _choices(text: str) -> int | list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError.of("--cores", text, "must be a number, or several with commas") from None
    return found[0] if len(found) == 1 else found


def _client(url: str | None, key: str | None, state: Path) -> Any:
    import httpx

    from slackwater.cli.running_service import find_service

    address, secret = find_service(url, key, state)
    return httpx.Client(base_url=address, headers={"x-api-key": secret}, timeout=40)


def _said(answer: Any) -> dict[str, Any]:
    """The answer's object, or its error as ours."""
    found: dict[str, Any] = answer.json()
    if answer.status_code == 429:
        raise UnavailableError(found["error"])
    if answer.status_code == 422:
        raise ConfigError(found["error"])
    if answer.status_code >= 400:
        raise RefusedError(found["error"])
    return found
