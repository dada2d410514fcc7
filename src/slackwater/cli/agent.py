"""`slackwater agent`: join this machine to a fleet."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from slackwater.cli.preflight import check_folder
from slackwater.model.errors import ConfigError
from slackwater.wire.join_token import read_token

app = typer.Typer(add_completion=False)

_TOKEN_VARIABLE = "SLACKWATER_JOIN"


def _read_join_token(join: str | None, file: Path | None) -> str:
    """Read the token from a file, standard input or the environment.

    The command line is refused because every user of the machine can read it.
    """
    if join is not None and join != "-":
        fix = "would show the token to every user here; use --join-file FILE, or - for stdin"
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
        raise ConfigError(
            "--join-file: is required, a file with the token that `slackwater node token NODE` "
            f"prints (or set {_TOKEN_VARIABLE})"
        )
    return token


@app.command()
def agent(
    join_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the token of `slackwater node token NODE`; - is standard input."
        ),
    ] = None,
    join: Annotated[
        str | None, typer.Option(hidden=True, help="Only -: the token is not an argument.")
    ] = None,
    site: Annotated[
        str,
        typer.Option(
            help="Name of its fast network; weights cross the slow network once per site."
        ),
    ] = "",
    devices: Annotated[
        int, typer.Option(help="On a CPU: split the cores into this many devices.")
    ] = 1,
    gpu_ids: Annotated[
        str | None, typer.Option(help="GPUs to offer, such as 0,1,2. Default: all.")
    ] = None,
    notice_s: Annotated[
        float,
        typer.Option(
            min=0,
            max=86_400,
            help="Seconds from SIGTERM to the agent's end; its turns move away meanwhile.",
        ),
    ] = 0.0,
    directory: Annotated[Path, typer.Option(help="Folder for models, versions and logs.")] = Path(
        "~/.cache/slackwater/node"
    ),
) -> int:
    """Run this machine's node agent until Ctrl-C or `slackwater down`; it reconnects if the
    service dies and comes back.
    """
    token = read_token(_read_join_token(join, join_file))
    folder = directory.expanduser().resolve()
    name = token["node"]
    environment = os.environ | {"SLACKWATER_WORKER_SECRET": token["key"]}
    environment.pop(_TOKEN_VARIABLE, None)
    if token["pin"]:
        environment["SLACKWATER_HUB_PIN"] = token["pin"]
    arguments = [sys.executable, "-m", "slackwater.worker.agent", "--redial", "--by-hand"]
    arguments += ["--connect", token["hub"], "--node", name, "--logs", str(folder / "logs")]
    arguments += ["--files", f"{token['depot']}={folder / 'files'}"]
    arguments += ["--devices", str(devices), "--notice-s", str(notice_s)]
    named = (("--pool", token["pool"]), ("--site", site or None), ("--gpu-ids", gpu_ids))
    for option, value in named:
        arguments += [] if value is None else [option, value]
    check_folder("--directory", folder)
    folder.mkdir(parents=True, exist_ok=True)
    print(f"node {name}: dialling {token['hub']}; stop with Ctrl-C", file=sys.stderr, flush=True)
    os.execve(sys.executable, arguments, environment)
