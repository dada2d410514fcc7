"""`slackwater sim`: simulates a fleet in virtual time."""

import contextlib
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from slackwater.cli.running_service import AsJson, DryRun, Sets, Trace
from slackwater.model.config import plain

if TYPE_CHECKING:
    from slackwater.control.record import Divergence
    from slackwater.sim.cluster.scenario import ClusterScenario

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Simulate a fleet in virtual time.",
)

File = Annotated[
    str, typer.Argument(metavar="FILE", help="Scenario file (.toml), or a name from `sim list`.")
]
Seed = Annotated[int | None, typer.Option(help="Seed of everything random.")]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw timeline and cost: .png, .svg or .pdf.")
]


@app.command()
def run(
    file: File,
    sets: Sets = None,
    policy: Annotated[
        str | None, typer.Option(help="Placement policy; short for --set policy.name=...")
    ] = None,
    seed: Seed = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    plot: Plot = None,
    hours: Annotated[
        str | None, typer.Option(metavar="FROM:TO", help="Hours of the run to --plot.")
    ] = None,
    trace: Trace = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write every event and command, for `sim replay`."),
    ] = None,
    joint: Annotated[
        bool,
        typer.Option("--joint", help="Simulate every turn: engines, weight versions and permits."),
    ] = False,
) -> None:
    """Run a scenario under one policy."""
    from slackwater.cli import scenario_source as source
    from slackwater.cli.atomic_file import atomic_file, check_place, unwind_on_terminate
    from slackwater.cli.progress import progress_bar

    unwind_on_terminate()
    written, scenario = source.read_source(file, sets, policy, seed)
    source.check_policy(scenario)
    fmt, window = source.plot_format(plot), source.hour_window(hours)
    check_place(trace, "--trace")
    if dry_run:
        print(source.settings_text(plain(written), as_json))
        return
    if joint:
        _run_jointly(scenario, as_json, trace)
        return
    from slackwater.sim.cluster.simulate import simulate

    with contextlib.ExitStack() as outputs:
        sink = outputs.enter_context(atomic_file(record, "--record")) if record else None
        with progress_bar(scenario.name) as progress:
            report = simulate(
                scenario, spans=bool(plot or trace), progress=progress, record=_line_writer(sink)
            )
    source.write_pictures(report, plot=plot, plot_format=fmt, trace=trace, hours=window)
    if as_json:
        from slackwater.sim.cluster.summary import run_summary

        print(json.dumps({**run_summary(report), "config": plain(written)}))
        return
    from slackwater.cli.run_tables import run_table, show

    show(run_table(report))


@app.command()
def compare(
    file: File,
    sets: Sets = None,
    policies: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Policies. Default: `compare` of the file.")
    ] = None,
    seed: Seed = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """Run a scenario under several policies and compare costs."""
    from slackwater.cli import scenario_source as source
    from slackwater.cli.atomic_file import write_atomically
    from slackwater.cli.progress import progress_bar

    written, scenario = source.read_source(file, sets, None, seed)
    scenarios = source.under_policies(scenario, written, policies)
    fmt = source.plot_format(plot)
    if dry_run:
        print(source.settings_text(plain(written), as_json))
        return
    from slackwater.sim.cluster.simulate import simulate

    reports = []
    with progress_bar(scenario.name) as progress:
        for number, each in enumerate(scenarios):

            def report_progress(
                share: float, done: int = number, name: str = each.policy.name
            ) -> None:
                progress((done + share) / len(scenarios), name)

            reports.append(simulate(each, progress=report_progress))
    if plot:
        from slackwater.timeline.plot import comparison_image

        title = f"{scenario.name}: what each policy pays"
        image = comparison_image(title, [report.timeline() for report in reports], fmt)
        write_atomically(plot, image, "--plot")
    if as_json:
        from slackwater.sim.cluster.summary import comparison

        print(json.dumps({"policies": comparison(reports), "config": plain(written)}))
        return
    from slackwater.cli.run_tables import comparison_table, show

    show(comparison_table(reports))


@app.command()
def replay(
    record: Annotated[Path, typer.Argument(metavar="RECORD", help="File of `sim run --record`.")],
    as_json: AsJson = False,
) -> None:
    """Replay a record and check that every decision is the same."""
    from slackwater.sim.cluster.simulate import replay_run

    agreed, divergence = replay_file(record, replay_run)
    if as_json:
        print(json.dumps({"events_agreed": agreed, "divergence": plain(divergence)}))
    else:
        print_replay(agreed, divergence, header_lines=1)
    if divergence is not None:
        raise typer.Exit(1)


def print_replay(agreed: int, divergence: "Divergence | None", *, header_lines: int = 0) -> None:
    """Print how far a record agrees with its replay."""
    if divergence is None:
        print(f"{agreed:,} events replayed; every command is the same")
        return
    line = divergence.line + header_lines
    print(f"{agreed:,} events agreed; line {line} differs: {divergence.event}")
    print(f"recorded: {divergence.recorded}")
    print(f"replayed: {divergence.replayed}")


@app.command("list")
def list_shipped(as_json: AsJson = False) -> None:
    """List the shipped scenarios."""
    from rich import box
    from rich.table import Table

    from slackwater.cli.run_tables import show
    from slackwater.sim.inputs.scenario_file import load_shipped_scenarios

    shipped = load_shipped_scenarios()
    if as_json:
        print(json.dumps({name: file.description for name, file in shipped.items()}))
        return
    table = Table("scenario", "what it is", "compares", box=box.SIMPLE_HEAD)
    for name, file in shipped.items():
        table.add_row(name, file.description, ", ".join(file.compare))
    show(table)


@app.command()
def results(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="Page to write.")] = Path(
        "docs/results/coscheduling.md"
    ),
    figures: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="DIR", help="NAME.json files of `slackwater bench NAME --json`."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of public traces, for `philly`.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller runs with the same keys.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
) -> None:
    """Write the page of results against the papers (needs a checkout)."""
    from slackwater.cli.atomic_file import check_place, unwind_on_terminate, write_atomically
    from slackwater.cli.checkout import load_benchmarks
    from slackwater.cli.progress import progress_bar

    load_benchmarks()
    results = importlib.import_module("benchmarks.coscheduling.results")
    unwind_on_terminate()
    check_place(out, "FILE")
    with progress_bar("results") as progress:
        page: str = results.current_page(figures, quick, seed, data, progress)
    write_atomically(out, page.encode(), "FILE")
    print(f"wrote {out}")


def _run_jointly(scenario: "ClusterScenario", as_json: bool, trace: Path | None) -> None:
    import dataclasses

    from slackwater.cli.atomic_file import write_atomically
    from slackwater.cli.progress import progress_bar
    from slackwater.sim.fleet.simulate import simulate_jointly
    from slackwater.timeline.perfetto import trace_json
    from slackwater.timeline.spans import Timeline

    def draw(timeline: Timeline) -> None:
        if trace is not None:
            write_atomically(trace, b"".join(trace_json(timeline)), "--trace")

    with progress_bar(scenario.name) as progress:
        report = dataclasses.asdict(simulate_jointly(scenario, progress=progress, draw=draw))
    if as_json:
        print(json.dumps(report))
        return
    for name, value in report.items():
        print(f"{name:>16}  {value:,.1f}" if isinstance(value, float) else f"{name:>16}  {value}")


def replay_file(
    record: Path, replay: Callable[[Iterator[bytes]], "tuple[int, Divergence | None]"]
) -> "tuple[int, Divergence | None]":
    """Replay a record; an error names the line that is none, such as one that a kill cut off."""
    import msgspec

    from slackwater.model.errors import ConfigError

    number = 0

    def count_lines(lines: IO[bytes]) -> Iterator[bytes]:
        nonlocal number
        for line in lines:
            number += 1
            yield line

    try:
        with record.open("rb") as lines:
            return replay(count_lines(lines))
    except OSError as error:
        raise ConfigError.of("RECORD", str(record), f"cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{record.name} line {number}: is not a line of a record ({error}); remove it if the "
            "recorded run was killed, or use a file that --record wrote"
        ) from None


def _line_writer(sink: IO[bytes] | None) -> Callable[[bytes], None] | None:
    def write(line: bytes) -> None:
        assert sink is not None
        sink.write(line)

    return write if sink else None
