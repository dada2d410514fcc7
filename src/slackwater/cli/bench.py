"""`slackwater bench NAME`: run one measurement and print it."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slackwater.model.errors import ConfigError

if TYPE_CHECKING:
    from slackwater.bench.options import BenchOptions

# One line per bench: its name, and its module under slackwater.bench (a subject, then a noun).
BENCHES: dict[str, str] = {
    "fleet": "fleet.nodes",
    "jobs": "fleet.jobs",
    "fleet_faults": "fleet.faults",
    "routing": "rollout.routing",
    "elastic": "rollout.elastic",
    "spot": "rollout.spot",
    "decision": "rollout.decision",
    "rollout_faults": "rollout.faults",
    "engine": "engine.cpu",
    "coserving": "serving.coserving",
    "serving_tick": "serving.tick",
    "pages": "serving.pages",
    "coserving_bursts": "serving.bursts",
    "grpo": "training.grpo",
    "cluster": "coscheduling.cluster",
    "drain": "coscheduling.drain",
    "drift": "coscheduling.drift",
    "philly": "coscheduling.philly",
    "sim": "coscheduling.sim",
    "placement": "coscheduling.placement",
    "optimum": "coscheduling.optimum",
    "fanin": "rollout.fanin",
    "rollout_kills": "rollout.kills",
    "migrate": "rollout.migrate",
    "agreement": "rollout.agreement",
    "delta": "weights.delta",
    "sync": "weights.sync",
    "sandbox": "actions.sandbox",
    "tenants": "service.tenants",
    "schemas": "service.schemas",
    "actions": "actions.broker",
}

app = typer.Typer(add_completion=False)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help=f"one of: {', '.join(BENCHES)}")],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    quick: Annotated[bool, typer.Option(help="a smaller run with the same keys")] = False,
    seed: Annotated[int, typer.Option(help="seed of everything random")] = 0,
    data: Annotated[Path | None, typer.Option(help="folder of public traces, where needed")] = None,
) -> None:
    """Measure NAME and print its figures; `all` measures everything, an object a line."""
    from slackwater.bench.options import BenchOptions

    if name not in (*BENCHES, "all"):
        raise ConfigError.of(
            "NAME", name, f"is no bench; write all, or one of: {', '.join(BENCHES)}"
        )
    options = BenchOptions(seed=seed, quick=quick, data=data)
    for each in BENCHES if name == "all" else (name,):
        _show(each, _measure(each, options), as_json)


def _measure(name: str, options: "BenchOptions") -> dict[str, object]:
    from rich.console import Console
    from rich.progress import Progress

    module = importlib.import_module(f"slackwater.bench.{BENCHES[name]}")
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=1.0)

        def progress(what: str, share: float) -> None:
            bar.update(task, description=f"{name}: {what}", completed=share)

        figures: dict[str, object] = module.run(replace(options, progress=progress))
    return figures


def _show(name: str, figures: dict[str, object], as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from slackwater.bench.machine import commit, machine

    if as_json:
        result = {"name": name, "commit": commit(), "machine": machine(), "figures": figures}
        print(json.dumps(result), flush=True)
        return
    table = Table("figure", "value", title=name)
    for key, value in figures.items():
        table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
