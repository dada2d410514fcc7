"""`slackwater bench NAME`: run one measurement and print it."""

import importlib
import json
from pathlib import Path
from typing import Annotated

import typer

from slackwater.model.errors import ConfigError

# One line per bench: module under slackwater.bench, named as the bench.
BENCHES: tuple[str, ...] = (
    "decision",
    "rollout_faults",
    "engine",
    "grpo",
    "cluster",
    "drain",
    "philly",
    "sim",
    "fanin",
    "rollout_kills",
    "migrate",
    "agreement",
)

app = typer.Typer(add_completion=False)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help=f"one of: {', '.join(BENCHES)}")],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    quick: Annotated[bool, typer.Option(help="a smaller run with the same keys")] = False,
    seed: Annotated[int, typer.Option(help="seed of everything random")] = 0,
    data: Annotated[Path | None, typer.Option(help="folder of public traces, where needed")] = None,
) -> None:
    """Measure NAME and print its figures."""
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from slackwater.bench.machine import commit, machine
    from slackwater.bench.options import BenchOptions

    if name not in BENCHES:
        raise ConfigError.of("NAME", name, f"is no bench; write one of: {', '.join(BENCHES)}")
    module = importlib.import_module(f"slackwater.bench.{name}")
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=1.0)

        def progress(what: str, share: float) -> None:
            bar.update(task, description=f"{name}: {what}", completed=share)

        figures = module.run(BenchOptions(seed=seed, quick=quick, data=data, progress=progress))
    if as_json:
        result = {"name": name, "commit": commit(), "machine": machine(), "figures": figures}
        print(json.dumps(result))
        return
    table = Table("figure", "value", title=name)
    for key, value in figures.items():
        table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
