"""`slackwater bench NAME`: run one measurement and print it."""

import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.options import BenchOptions, ReplayOptions
from slackwater.cli.up_options import DEFAULT_STATE
from slackwater.model.errors import ConfigError

# One line per benchmark: its name, and its module under benchmarks/ (a subject, then a noun).
BENCHES: dict[str, str] = {
    "fleet": "fleet.nodes",
    "jobs": "fleet.jobs",
    "fleet_faults": "fleet.faults",
    "coexec_kills": "fleet.job_kills",
    "plane_kills": "fleet.plane_kills",
    "same_run": "fleet.same_run",
    "ranks": "fleet.ranks",
    "devices": "fleet.devices",
    "routing": "rollout.routing",
    "elastic": "rollout.elastic",
    "spot": "rollout.spot",
    "decision": "rollout.decision",
    "rollout_faults": "rollout.faults",
    "engine": "engine.cpu",
    "coserving": "serving.coserving",
    "lending": "serving.whole_traces",
    "slacks": "slacks.contributions",
    "slack_storms": "slacks.storms",
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
    "vllm_sync": "rollout.vllm_sync",
    "delta": "weights.delta",
    "sync": "weights.sync",
    "links": "weights.links",
    "sandbox": "actions.sandbox",
    "tenants": "service.tenants",
    "plane": "service.plane",
    "intruders": "intruders.campaign",
    "schemas": "service.schemas",
    "soak": "soak.soak",
    "streaming": "service.streaming",
    "actions": "actions.broker",
    "switch": "state.switch",
    "trl_coexec": "state.trl_coexec",
    "coexec": "coscheduling.coexec",
    "slo_clock": "coscheduling.slo_clock",
}

_BY_NAME_ONLY = ("lending", "replay", "soak", "vllm_sync")  # a trace, an hour, a vLLM

app = typer.Typer(add_completion=False)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(BENCHES)}.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A smaller run with the same figures.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    data: Annotated[
        Path | None, typer.Option(help="Folder of public traces, where needed.")
    ] = None,
    before: Annotated[
        Path | None, typer.Option(help="Source folder of an older version to compare with.")
    ] = None,
    part: Annotated[str | None, typer.Option(help="Run only this part of the benchmark.")] = None,
    processes: Annotated[
        int | None,
        typer.Option(min=1, help="Cells measured at once, where a benchmark has several."),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Replay: the file of requests.")] = None,
    url: Annotated[
        str | None, typer.Option(help="Replay: OpenAI endpoint without /v1; default: the one here.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Replay: its key.")] = None,
    model: Annotated[str | None, typer.Option(help="Replay: default is its first model.")] = None,
    slo: Annotated[str, typer.Option(help="Replay: the SLO.")] = "ttft=0.5,tpot=0.15",
    speed: Annotated[float, typer.Option(help="Replay: speed-up factor of the trace.")] = 1.0,
    duration: Annotated[
        float | None,
        typer.Option(
            help="Replay, soak, ranks, lending, crowd: seconds; default 60, 3600, 3600, 1700, 600."
        ),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks, scattered fan-in: how many; default 50, 3."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Slacks: keep the live run here, or predict the kept one again."),
    ] = None,
    from_s: Annotated[
        float, typer.Option("--from", help="Replay: start at this second of the trace.")
    ] = 0.0,
    max_prompt_tokens: Annotated[
        int,
        typer.Option(
            "--max-prompt-tokens", "--most-prompt", help="Replay: truncate longer prompts."
        ),
    ] = 8192,
    max_output_tokens: Annotated[
        int,
        typer.Option(
            "--max-output-tokens", "--most-output", help="Replay: truncate longer outputs."
        ),
    ] = 1024,
    state: Annotated[
        Path, typer.Option(help="Replay: folder of the service here.")
    ] = DEFAULT_STATE,
) -> None:
    """Run benchmark NAME, print its figures; `all`: all but lending, replay, soak and vllm_sync."""
    from slackwater.cli.atomic_file import unwind_on_terminate
    from slackwater.cli.running_service import find_service
    from slackwater.model.serving import ServingSlo

    unwind_on_terminate()  # services that a bench started end with it
    if name not in (*BENCHES, "all"):
        raise ConfigError.of(
            "NAME", name, f"is not a benchmark; write all, or one of: {', '.join(BENCHES)}"
        )
    options = BenchOptions(
        seed=seed,
        quick=quick,
        data=data,
        before=before,
        part=part,
        duration_s=duration,
        runs=runs,
        record=record,
        processes=processes,
        partial=_print_partial,
    )
    if name == "replay":
        if trace is None:
            raise ConfigError.of("--trace", None, "is needed: a file of requests to replay")
        found_url, found_key = find_service(url, key, state)
        seconds = 60.0 if duration is None else duration
        replay = ReplayOptions(
            *(found_url, found_key, trace, ServingSlo.parse(slo), model, speed),
            *(
                min(seconds, 10.0) if quick else seconds,
                from_s,
                max_prompt_tokens,
                max_output_tokens,
            ),
        )
        options = replace(options, replay=replay)
    every = [each for each in BENCHES if each not in _BY_NAME_ONLY]
    for each in every if name == "all" else (name,):
        _show(each, _measure(each, options), as_json)


def _measure(name: str, options: BenchOptions) -> dict[str, object]:
    from benchmarks.cli.stage_bar import stage_bar

    module = importlib.import_module(f"benchmarks.{BENCHES[name]}")
    parts: tuple[str, ...] = getattr(module, "PARTS", ())
    if options.part is not None and options.part not in parts:
        fix = f"must be one of: {', '.join(parts)}" if parts else f"is not a part: {name} has none"
        raise ConfigError.of("--part", options.part, fix)
    with stage_bar(name) as progress:
        figures: dict[str, object] = module.run(replace(options, progress=progress))
    return figures


def _print_partial(cell: str, figures: Mapping[str, float]) -> None:
    """One line per finished cell on stderr, so that a run which is cut short still tells."""
    print(json.dumps({"cell": cell, "figures": dict(figures)}), file=sys.stderr, flush=True)


def _show(name: str, figures: dict[str, object], as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from benchmarks.machine import commit, machine

    if as_json:
        result = {"name": name, "commit": commit(), "machine": machine(), "figures": figures}
        print(json.dumps(result), flush=True)
        return
    table = Table("figure", "value", title=name)
    for key, value in figures.items():
        table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
