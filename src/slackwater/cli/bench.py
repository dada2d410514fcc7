"""`slackwater bench NAME`: run one measurement and print it."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slackwater.cli.up import DEFAULT_STATE
from slackwater.model.errors import ConfigError

if TYPE_CHECKING:
    from slackwater.bench.options import BenchOptions

# One line per bench: its name, and its module under slackwater.bench (a subject, then a noun).
BENCHES: dict[str, str] = {
    "fleet": "fleet.nodes",
    "jobs": "fleet.jobs",
    "fleet_faults": "fleet.faults",
    "coexec_kills": "fleet.job_kills",
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
    "replay": "serving.replay",
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
    "links": "weights.links",
    "sandbox": "actions.sandbox",
    "tenants": "service.tenants",
    "schemas": "service.schemas",
    "streaming": "service.streaming",
    "actions": "actions.broker",
    "switch": "state.switch",
    "trl_coexec": "state.trl_coexec",
    "coexec": "coscheduling.coexec",
}

app = typer.Typer(add_completion=False)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help=f"one of: {', '.join(BENCHES)}")],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    quick: Annotated[bool, typer.Option(help="a smaller run with the same keys")] = False,
    seed: Annotated[int, typer.Option(help="seed of everything random")] = 0,
    data: Annotated[Path | None, typer.Option(help="folder of public traces, where needed")] = None,
    before: Annotated[
        Path | None,
        typer.Option(help="source folder of an older version, for benches that compare"),
    ] = None,
    part: Annotated[
        str | None, typer.Option(help="one part alone, of a bench that has parts")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="replay: the file of requests")] = None,
    url: Annotated[
        str | None, typer.Option(help="replay: OpenAI endpoint without /v1; default: the one here")
    ] = None,
    key: Annotated[str | None, typer.Option(help="replay: its key")] = None,
    model: Annotated[str | None, typer.Option(help="replay: default is its first model")] = None,
    slo: Annotated[str, typer.Option(help="replay: the promise")] = "ttft=0.5,tpot=0.15",
    speed: Annotated[float, typer.Option(help="replay: seconds of the trace in one second")] = 1.0,
    duration: Annotated[float, typer.Option(help="replay: seconds that requests come")] = 60.0,
    from_s: Annotated[
        float, typer.Option("--from", help="replay: the trace's second to begin at")
    ] = 0.0,
    most_prompt: Annotated[int, typer.Option(help="replay: tokens; longer are cut")] = 8192,
    most_output: Annotated[int, typer.Option(help="replay: tokens; longer are cut")] = 1024,
    state: Annotated[Path, typer.Option(help="replay: folder of the service here")] = DEFAULT_STATE,
) -> None:
    """Measure NAME and print its figures; `all` measures everything but replay, an object a line."""
    from slackwater.bench.options import BenchOptions, ReplayOptions
    from slackwater.cli.running_service import find_service
    from slackwater.cli.stopping import unwind_on_terminate
    from slackwater.model.serving import ServingSlo

    unwind_on_terminate()  # services that a bench started end with it
    if name not in (*BENCHES, "all"):
        raise ConfigError.of(
            "NAME", name, f"is no bench; write all, or one of: {', '.join(BENCHES)}"
        )
    options = BenchOptions(seed=seed, quick=quick, data=data, before=before, part=part)
    if name == "replay":
        if trace is None:
            raise ConfigError.of("--trace", None, "is needed: a file of requests to replay")
        found_url, found_key = find_service(url, key, state)
        replay = ReplayOptions(
            *(found_url, found_key, trace, ServingSlo.parse(slo), model, speed),
            *(min(duration, 10.0) if quick else duration, from_s, most_prompt, most_output),
        )
        options = replace(options, replay=replay)
    every = [each for each in BENCHES if each != "replay"]
    for each in every if name == "all" else (name,):
        _show(each, _measure(each, options), as_json)


def _measure(name: str, options: "BenchOptions") -> dict[str, object]:
    from rich.console import Console
    from rich.progress import Progress

    module = importlib.import_module(f"slackwater.bench.{BENCHES[name]}")
    parts: tuple[str, ...] = getattr(module, "PARTS", ())
    if options.part is not None and options.part not in parts:
        fix = f"must be one of: {', '.join(parts)}" if parts else f"is no part: {name} has none"
        raise ConfigError.of("--part", options.part, fix)
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
