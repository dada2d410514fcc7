"""`slackwater agent`: join this machine to a fleet."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from slackwater.model.errors import ConfigError
from slackwater.wire.join_token import read_token

app = typer.Typer(add_completion=False)

_TOKEN_VARIABLE = "SLACKWATER_JOIN"


def _given_token(join: str | None, file: Path | None) -> str:
    """From a file, the standard input or the environment; a command line is for all to read."""
    if join is not None and join != "-":
        fix = "would show the token to everybody here; give --join-file FILE, or - to read it"
        raise ConfigError.of("--join", f"{join[:8]}...", fix)
    if join == "-" or (file is not None and str(file) == "-"):
        return sys.stdin.readline().strip()
    if file is not None:
        try:
            return file.read_text().strip()
        except OSError as error:
            why = f"cannot be read: {error.strerror}"
            raise ConfigError.of("--join-file", str(file), why) from None
    token = os.environ.get(_TOKEN_VARIABLE, "")
    if not token:
        fix = (
            f"is needed: a token of `slackwater node token NODE`; {_TOKEN_VARIABLE} may hold it too"
        )
        raise ConfigError.of("--join-file", file, fix)
    return token


@app.command()
def agent(
    join_file: Annotated[
        Path | None,
        typer.Option(help="File with the token of `slackwater node token NODE`; - reads it."),
    ] = None,
    join: Annotated[
        str | None, typer.Option(hidden=True, help="Only -: the token is not an argument.")
    ] = None,
    pool: Annotated[str | None, typer.Option(hidden=True, help="Part of the token now.")] = None,
    node: Annotated[str | None, typer.Option(hidden=True, help="Part of the token now.")] = None,
    site: Annotated[
        str, typer.Option(help="Name of its fast network: weights reach a site once.")
    ] = "",
    devices: Annotated[
        int, typer.Option(help="On a CPU: so many equal slices of the cores, each a device.")
    ] = 1,
    gpu_ids: Annotated[
        str | None, typer.Option(help="GPUs that it lends, such as 0,1,2. Default: all.")
    ] = None,
    notice_s: Annotated[
        float,
        typer.Option(
            min=0, max=86_400, help="Seconds from SIGTERM to its end, in which turns move away."
        ),
    ] = 0.0,
    directory: Annotated[Path, typer.Option(help="Folder for models, versions and logs.")] = Path(
        "~/.cache/slackwater/node"
    ),
) -> int:
    """Run this machine's node agent until Ctrl-C; it reconnects to the control plane."""
    told = read_token(_given_token(join, join_file))
    for option, said, meant in (("--pool", pool, told["pool"]), ("--node", node, told["node"])):
        if said is not None and said != meant:
            raise ConfigError.of(option, said, f"must be that of the token, which is for {meant!r}")
    own = directory.expanduser().resolve()
    name = told["node"]
    environment = os.environ | {"SLACKWATER_WORKER_SECRET": told["key"]}
    environment.pop(_TOKEN_VARIABLE, None)
    if told["pin"]:
        environment["SLACKWATER_HUB_PIN"] = told["pin"]
    arguments = [sys.executable, "-m", "slackwater.worker.agent", "--redial", "--by-hand"]
    arguments += ["--connect", told["hub"], "--node", name, "--logs", str(own / "logs")]
    arguments += ["--files", f"{told['depot']}={own / 'files'}"]
    if told["pool"] is not None:
        arguments += ["--pool", told["pool"]]
    if site:
        arguments += ["--site", site]
    arguments += ["--devices", str(devices), "--notice-s", str(notice_s)]
    if gpu_ids is not None:
        arguments += ["--gpu-ids", gpu_ids]
    own.mkdir(parents=True, exist_ok=True)
    print(f"node {name}: dialling {told['hub']}; stop with Ctrl-C", file=sys.stderr, flush=True)
    os.execve(sys.executable, arguments, environment)
