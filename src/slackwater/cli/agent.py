"""`slackwater agent`: bring this machine into a fleet."""

import base64
import json
import os
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from slackwater.model.errors import ConfigError

app = typer.Typer(add_completion=False)


def write_token(join: dict[str, Any]) -> str:
    """Everything an agent must know, as one word. It holds the fleet's secret: give it to nobody else."""
    return base64.urlsafe_b64encode(json.dumps(join).encode()).decode()


def read_token(token: str) -> dict[str, Any]:
    """What `write_token` wrote."""
    try:
        join = json.loads(base64.urlsafe_b64decode(token))
        return {"pin": None} | {key: join[key] for key in ("hub", "depot", "secret", "pin")}
    except (ValueError, KeyError, TypeError):
        fix = "is not a token; take one with `slackwater node token` where the service runs"
        raise ConfigError.of("--join", f"{token[:12]}...", fix) from None


@app.command()
def agent(
    join: Annotated[
        str,
        typer.Option(
            envvar="SLACKWATER_JOIN", help="Token of `slackwater node token`; - reads it."
        ),
    ],
    pool: Annotated[
        str | None, typer.Option(help="Pool of the fleet that this node is of.")
    ] = None,
    node: Annotated[
        str | None, typer.Option(help="Name of this node. Default: its host name.")
    ] = None,
    site: Annotated[
        str, typer.Option(help="Name of the fast network it is on: weights come to a site once.")
    ] = "",
    directory: Annotated[
        Path, typer.Option(help="Folder for fetched models, versions and logs.")
    ] = Path("~/.cache/slackwater/node"),
) -> int:
    """Run this machine's node agent until Ctrl-C; it dials the control plane, and again when it has gone."""
    told = read_token(sys.stdin.readline().strip() if join == "-" else join)
    own = directory.expanduser().resolve()
    name = node or socket.gethostname().split(".")[0]
    environment = os.environ | {"SLACKWATER_WORKER_SECRET": told["secret"]}
    environment.pop("SLACKWATER_JOIN", None)
    if told["pin"]:
        environment["SLACKWATER_HUB_PIN"] = told["pin"]
    arguments = [sys.executable, "-m", "slackwater.worker.agent", "--redial", "--by-hand"]
    arguments += ["--connect", told["hub"], "--node", name, "--logs", str(own / "logs")]
    arguments += ["--files", f"{told['depot']}={own / 'files'}"]
    if pool is not None:
        arguments += ["--pool", pool]
    if site:
        arguments += ["--site", site]
    own.mkdir(parents=True, exist_ok=True)
    print(f"node {name}: dialling {told['hub']}; stop with Ctrl-C", file=sys.stderr, flush=True)
    os.execve(sys.executable, arguments, environment)
