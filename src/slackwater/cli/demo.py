"""`slackwater demo`: jobs share a small fleet while an instance joins and dies."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from slackwater.cli.job import read_job_file
from slackwater.cli.running_service import AsJson
from slackwater.model.errors import ConfigError

_POOLS = """
[[pools]]
name = "rollout"
engines = 1
[[pools]]
name = "train"
engines = 0
trainers = 1
"""
app = typer.Typer(add_completion=False)


def two_nodes(rollout: Sequence[int] = (), train: Sequence[int] = ()) -> str:
    """A fleet file with one engine node and one trainer node, pinned to these cores if given."""
    nodes = (("r0", "rollout", rollout), ("t0", "train", train))
    return _POOLS + "".join(
        f'[[nodes]]\nname = "{name}"\npool = "{pool}"\n'
        + (f"cores = {list(cores)}\n" if cores else "")
        for name, pool, cores in nodes
    )


@app.command()
def demo(
    folder: Annotated[Path, typer.Argument(help="Folder of job files (*.toml).")],
    run: Annotated[
        Path, typer.Option("--run", help="Output folder; deletes an earlier demo there.")
    ] = Path("runs/demo"),
    models: Annotated[Path | None, typer.Option("--models", help="Folder of models.")] = None,
    alone: Annotated[
        int | None,
        typer.Option(min=2, help="Iterations that each job first runs alone. Default: all."),
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(min=3, help="Iterations of each job. Default: those of its file.")
    ] = None,
    slacks: Annotated[
        bool,
        typer.Option(
            "--slacks", help="Also serve a model that lends its device, run tools and send deltas."
        ),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Start a service, run each job alone, then all together, and compare."""
    from slackwater.cli.atomic_file import unwind_on_terminate
    from slackwater.cli.demo_display import demo_table
    from slackwater.cli.demo_run import DemoRun
    from slackwater.cli.own_service import own_service
    from slackwater.zoo.sources import is_model, models_directory
    from slackwater.zoo.tiny import SIZES, make_model

    files = [read_job_file(path) for path in sorted(folder.glob("*.toml"))]
    if not files:
        raise ConfigError.of("FOLDER", str(folder), "must be a folder of job files (*.toml)")
    bases = {str(file["model"]) for file in files}
    if len(bases) > 1 or not bases <= set(SIZES):
        fix = f"must be one model for all jobs, and one of: {', '.join(SIZES)}"
        raise ConfigError.of("model", ", ".join(sorted(bases)), fix)
    for file in files:
        file["iterations"] = iterations or file["iterations"]
    unwind_on_terminate()
    base = bases.pop()
    directory = models_directory(models) / base
    if not is_model(directory):
        make_model(base, directory)
    if (run / "service" / "slackwater.db").exists():
        shutil.rmtree(run)
    run.mkdir(parents=True, exist_ok=True)
    if not as_json:
        print("starting a service (the first start compiles code and takes longer)", flush=True)
    if slacks:
        from slackwater.cli.demo_slacks import slack_demo, slack_options

        chat = run / "chat"
        make_model("tiny", chat, seed=5)
        options = slack_options(run, chat)
        with own_service(run / "service", base, directory, *options) as (url, key):
            result = slack_demo(url, key, run, files, alone, quiet=as_json)
    else:
        with own_service(run / "service", base, directory, *_service_options(run)) as (url, key):
            result = DemoRun(url, key, run, quiet=as_json).run(files, alone)
    (run / "result.json").write_text(json.dumps(result, indent=2))
    if as_json:
        print(json.dumps(result))
    else:
        from rich.console import Console

        Console().print(demo_table(result))
        if slacks:
            from slackwater.cli.demo_slacks import slack_table

            Console().print(slack_table(result))
    return 1 if any(row["stage"] != "finished" for row in result["jobs"]) else 0


def _service_options(run: Path) -> list[str]:
    """Options of the service: a rollout and a train node, each pinned to half of the cores."""
    # This placement policy compiles fastest.
    options = ["--set", "coschedule.placement=group"]
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    if len(cores) < 2:
        return options
    fleet = run / "fleet.toml"
    half = len(cores) // 2
    fleet.write_text(two_nodes(cores[:half], cores[half:]))
    return [*options, "--fleet", str(fleet)]
