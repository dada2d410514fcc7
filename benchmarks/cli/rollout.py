"""`slackwater rollout`: one rollout scenario in virtual time, under each of its rules."""

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def rollout(
    source: Annotated[str, typer.Argument(help="A .toml file, a shipped scenario, or: list.")],
    rules: Annotated[str | None, typer.Option(help="Rules to compare, with commas.")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="a.b=value.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run SOURCE under each of its rules and print the results."""
    import dataclasses
    import json

    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from benchmarks.rollout.simulated.scenario import (
        read_rollout_scenario,
        run_rollout_scenario,
        shipped_rollout_scenarios,
    )

    if source == "list":
        for name, table in shipped_rollout_scenarios().items():
            print(f"{name:24} {table.get('description', '')}")
        return
    assignments = [*(sets or []), *([f"seed={seed}"] if seed is not None else [])]
    scenario, folder = read_rollout_scenario(source, assignments)
    if rules is not None:
        chosen = tuple(rule.strip() for rule in rules.split(","))
        scenario = dataclasses.replace(scenario, rules=chosen)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(scenario.name, total=1.0)
        results = run_rollout_scenario(
            scenario,
            folder,
            lambda what, share: bar.update(task, description=what, completed=share),
        )
    if as_json:
        print(json.dumps({"name": scenario.name, "rules": results}))
        return
    columns = list(next(iter(results.values()), {}))
    shown = Table("rule", *columns, title=scenario.name)
    for rule, figures in results.items():
        shown.add_row(rule, *(f"{figures[column]:.5g}" for column in columns))
    Console().print(shown)
