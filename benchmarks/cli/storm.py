"""`slackwater storm`: random faults over the controllers, from a seed that can be run again."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def storm(
    seed: Annotated[int, typer.Option(help="The storm's seed.")] = 0,
    hours: Annotated[float, typer.Option(help="Simulated hours.", min=0.01)] = 5.0,
    slacks: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A fleet with five kinds of slack, as of `plan`."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run one storm; exit 1 with the broken invariant if there is one."""
    import dataclasses
    import json

    from benchmarks.fleet.storm import fleet_storm
    from slackwater.model.errors import RefusedError

    try:
        if slacks is not None:
            from benchmarks.slacks.storm import SlackStorm
            from slackwater.sim.slacks.scenario import read_slack_scenario

            report = dataclasses.asdict(SlackStorm(read_slack_scenario(slacks), seed, hours).run())
        else:
            report = dataclasses.asdict(fleet_storm(seed, hours))
    except AssertionError as error:
        raise RefusedError(f"seed {seed}: an invariant did not hold: {error}") from error
    if as_json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        print(f"{name:>16}  {value}")
