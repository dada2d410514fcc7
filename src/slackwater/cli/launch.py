"""`slackwater launch`: starts the nodes of a fleet on a cluster."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from slackwater.cli.node import node_token
from slackwater.cli.running_service import State
from slackwater.cli.up_options import DEFAULT_STATE
from slackwater.model.errors import ConfigError

if TYPE_CHECKING:
    from slackwater.runtime.launch.kubernetes import KubernetesPool
    from slackwater.runtime.launch.slurm import SlurmPool

P = TypeVar("P", "SlurmPool", "KubernetesPool")

app = typer.Typer(add_completion=False, no_args_is_help=True)

Fleet = Annotated[Path, typer.Option("--fleet", help="The fleet file of `slackwater up`.")]
Pool = Annotated[
    str | None, typer.Option(help="Launch only this pool. Default: all pools of the file.")
]


@app.callback()
def root() -> None:
    """Start the nodes of a fleet on a Slurm or Kubernetes cluster."""


def _select_pools(table: str, listed: Sequence[P], pool: str | None) -> list[P]:
    found = [each for each in listed if pool in (None, each.pool)]
    if not found:
        known = ", ".join(each.pool for each in listed) or "none"
        raise ConfigError.of("--pool", pool, f"has no [[{table}]] in the file; there are: {known}")
    return found


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
    """Submit one sbatch script per [[slurm]] pool."""
    from slackwater.runtime.launch.fleet_file import read_fleet_file
    from slackwater.runtime.launch.slurm import batch_script, submit, write_batch_files

    pools = _select_pools("slurm", read_fleet_file(fleet).slurm, pool)
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


@app.command()
def kubernetes(
    fleet: Fleet,
    pool: Pool = None,
    service: Annotated[
        bool, typer.Option("--service", help="Print the manifests of the service instead of pools.")
    ] = False,
    image: Annotated[str, typer.Option(help="Image of the service.")] = "slackwater:latest",
    namespace: Annotated[str, typer.Option(help="Namespace of the service.")] = "default",
    storage_gb: Annotated[int, typer.Option(help="Disk of the service, in GiB.")] = 100,
    option: Annotated[
        list[str] | None, typer.Option(help="Another option of `slackwater up`; repeatable.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the manifests without tokens; needs no running service."
        ),
    ] = False,
    state: State = DEFAULT_STATE,
) -> None:
    """Print manifests of [[kubernetes]] pools or of the service."""
    from slackwater.runtime.launch.fleet_file import read_fleet_file
    from slackwater.runtime.launch.kubernetes import pool_manifests, service_manifests

    file = read_fleet_file(fleet)
    if service:
        manifests = service_manifests(
            fleet.read_text(),
            image=image,
            namespace=namespace,
            storage_gb=storage_gb,
            options=option or [],
        )
    else:
        pools = _select_pools("kubernetes", file.kubernetes, pool)

        def token_of(node: str, of_pool: str) -> str:
            return "dry-run" if dry_run else node_token(state, node, of_pool)

        manifests = pool_manifests(pools, token_of)
    print(json.dumps(manifests, indent=2))
