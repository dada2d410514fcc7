"""`slackwater launch`: bring the nodes of a fleet up on a cluster."""

from pathlib import Path
from typing import Annotated

import typer

from slackwater.cli.node import node_token
from slackwater.cli.running_service import State
from slackwater.cli.up_options import DEFAULT_STATE
from slackwater.model.errors import ConfigError

app = typer.Typer(add_completion=False, no_args_is_help=True)

Fleet = Annotated[Path, typer.Option("--fleet", help="The fleet file of `slackwater up`.")]
Pool = Annotated[str | None, typer.Option(help="This pool alone. Default: all that it lists.")]


@app.callback()
def root() -> None:
    """Bring the nodes of a fleet up on a cluster."""


@app.command()
def slurm(
    fleet: Fleet,
    pool: Pool = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Shared folder for scripts, tokens and logs. Default: STATE/slurm."),
    ] = None,
    files_only: Annotated[
        bool, typer.Option("--files-only", help="Write scripts and tokens, and submit nothing.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the scripts; write and submit nothing.")
    ] = False,
    state: State = DEFAULT_STATE,
) -> None:
    """Submit one sbatch script per pool of [[slurm]]; its nodes join the running service."""
    from slackwater.runtime.launch.fleet_file import read_fleet_file
    from slackwater.runtime.launch.slurm import batch_script, submit, write_batch_files

    file = read_fleet_file(fleet)
    pools = [each for each in file.slurm if pool in (None, each.pool)]
    if not pools:
        listed = ", ".join(each.pool for each in file.slurm) or "none"
        raise ConfigError.of("--pool", pool, f"has no [[slurm]] in {fleet}; there are: {listed}")
    shared = (folder or state / "slurm").expanduser().resolve()
    if dry_run:
        print("\n".join(batch_script(each, shared) for each in pools), end="")
        return
    scripts = write_batch_files(
        pools, shared, lambda node, of_pool: node_token(state, node, of_pool)
    )
    for each in () if files_only else pools:
        job = submit(each, scripts[each.pool])
        print(f"pool {each.pool}: Slurm job {job}, {each.nodes} nodes; logs in {shared}")
