"""`slackwater job`: the jobs of a running service, and what each has used."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from slackwater.cli.up import DEFAULT_STATE
from slackwater.model.errors import UnavailableError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="The jobs of a running service.",
)


@app.callback()
def jobs() -> None:
    """The jobs of a running service."""


@app.command("list")
def list_jobs(
    state: Annotated[Path, typer.Option(help="The service's folder.")] = DEFAULT_STATE,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Every job, where it stands, and its account: device seconds, tokens, waiting."""
    found = _ask(state)
    if as_json:
        print(json.dumps(found))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    columns = ("job", "tenant", "stage", "device s", "tokens", "turns", "ops", "waited s")
    table = Table(*columns, box=box.SIMPLE_HEAD)
    for row in found["jobs"]:
        waited_s = row["turns_waited_s"] + row["operations_waited_s"]
        used = (f"{row['device_s']:.1f}", f"{row['tokens']:,}", f"{row['turns']:,}")
        table.add_row(
            *(row["job"], row["tenant"], row["stage"], *used),
            *(f"{row['operations']:,}", f"{waited_s:.1f}"),
        )
    Console().print(table)


def _ask(state: Path) -> dict[str, Any]:
    import httpx

    from slackwater.runtime.store.state_directory import StateDirectory

    folder = StateDirectory(state)
    server = folder.read_server()
    if not folder.is_locked() or server is None:
        raise UnavailableError(
            f"no service is running on {folder.root}; `slackwater up` starts one"
        )
    url = server["url"]
    try:
        headers = {"x-api-key": server["key"]}
        answer = httpx.get(f"{url}/slackwater/jobs", headers=headers, timeout=10)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        raise UnavailableError(f"{url} does not answer: {error}") from None
    said: dict[str, Any] = answer.json()
    return said
