"""`slackwater instance`: lists, adds and removes the engines of a running service."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from slackwater.cli.running_service import AsJson, State, ask_service
from slackwater.cli.up_options import DEFAULT_STATE

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Engines of a running service.")

Instance = Annotated[str, typer.Argument(help="Name, as in `slackwater instance list`.")]
Model = Annotated[str | None, typer.Option(help="Model; required if the service has several.")]
Kind = Annotated[str, typer.Option(help="dedicated, spot or borrowed.")]
Engine = Annotated[str, typer.Option(help="embedded, vllm or sglang.")]
Tp = Annotated[int, typer.Option(help="Devices of each instance (tensor parallel).")]
Url = Annotated[
    str | None, typer.Option(help="A running vLLM or SGLang server. Default: start one.")
]

_COLUMNS = ("instance", "model", "kind", "state", "running", "pending", "tokens_per_s", "pid")
_TITLES = {"tokens_per_s": "tok/s"}


@app.command("list")
def list_instances(state: State = DEFAULT_STATE, as_json: AsJson = False) -> None:
    """List instances, with failed starts."""
    found = _ask(state, "GET", "")
    if as_json:
        print(json.dumps(found))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in _COLUMNS:
        table.add_column(_TITLES.get(column, column), overflow="fold")
    for row in found["instances"]:
        table.add_row(*(str(row.get(column, "")) for column in _COLUMNS))
    Console().print(table)
    for row in found["instances"]:
        if row["state"] == "failed":
            print(
                f"{row['instance']}: failed to start {row['failed_starts']} times: {row['error']}"
            )
    for fault in found["faults"]:
        print(fault)


@app.command()
def add(
    count: Annotated[int, typer.Option(help="Number of instances.")] = 1,
    model: Model = None,
    kind: Kind = "spot",
    engine: Engine = "embedded",
    url: Url = None,
    tp: Tp = 1,
    state: State = DEFAULT_STATE,
    as_json: AsJson = False,
) -> None:
    """Start more instances; they take turns as soon as they are up."""
    body = {"count": count, "model": model, "kind": kind, "engine": engine, "url": url, "tp": tp}
    found = _ask(state, "POST", "", body)
    print(json.dumps(found) if as_json else f"starting {', '.join(found['added']) or 'none'}")


@app.command()
def drain(
    instance: Instance,
    move_turns: Annotated[
        bool, typer.Option("--move-turns", help="Move its turns now, instead of letting them end.")
    ] = False,
    state: State = DEFAULT_STATE,
) -> None:
    """Give an instance no new turns, and release it when it has none."""
    _ask(state, "POST", f"/{instance}/drain", {"move_turns": move_turns})
    print(f"draining {instance}")


@app.command()
def kill(instance: Instance, state: State = DEFAULT_STATE) -> None:
    """Kill an instance; its turns resume elsewhere."""
    _ask(state, "POST", f"/{instance}/kill", {})
    print(f"killed {instance}")


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="Spot trace: t_s,event,instance_id (.csv, .gz).")],
    speed: Annotated[float, typer.Option(help="Speed-up factor of the trace.")] = 1.0,
    notice_s: Annotated[float, typer.Option(help="Seconds of notice before a removal.")] = 0.0,
    model: Model = None,
    engine: Engine = "embedded",
    url: Url = None,
    state: State = DEFAULT_STATE,
) -> None:
    """Replay a spot trace: add and remove instances in real time."""
    from slackwater.model.spot_trace import read_spot_trace

    lines = [f"{e.t_s!r},{e.event},{e.instance_id}" for e in read_spot_trace(trace)]
    body: dict[str, Any] = {"trace": "\n".join(["t_s,event,instance_id", *lines])}
    body |= {"speed": speed, "notice_s": notice_s, "model": model, "engine": engine, "url": url}
    found = _ask(state, "POST", "/replay", body)
    print(f"replaying {found['events']} events")


@app.command()
def verify(
    record: Annotated[
        Path, typer.Argument(help="RECORD.fleet.jsonl, written by `up --record RECORD`.")
    ],
    config: Annotated[
        Path | None,
        typer.Option(help="config.toml in the service's folder. Default: the default settings."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Check that a new controller decides the same from a record."""
    from slackwater.cli.sim import print_replay, replay_file
    from slackwater.cli.up import settings_table
    from slackwater.control.fleet.messages import EVENT_TYPES
    from slackwater.control.record import replay as replay_record
    from slackwater.model.config import decode
    from slackwater.runtime.fleet_controller import new_fleet_controller
    from slackwater.runtime.settings import ServiceSettings

    table = {"state": ".", "models": {}} | settings_table(config, {}, [])
    controller = new_fleet_controller(decode(ServiceSettings, table))
    agreed, divergence = replay_file(
        record, lambda lines: replay_record(controller, lines, EVENT_TYPES)
    )
    if as_json:
        line = None if divergence is None else divergence.line
        print(json.dumps({"events_agreed": agreed, "first_divergence": line}))
    else:
        print_replay(agreed, divergence)
    return 0 if divergence is None else 1


def _ask(state: Path, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    return ask_service(state, method, f"/slackwater/instances{path}", body)
