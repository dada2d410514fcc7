"""Measurements of a running service, for `slackwater plan --slacks FILE --from-service`."""

import csv
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slackwater.cli.running_service import ServiceClient
from slackwater.model.errors import ConfigError
from slackwater.model.spot_trace import SpotEvent
from slackwater.sim.serving.serving_trace import read_serving_trace
from slackwater.sim.slacks.scenario import PERIOD_S

_PROFILE = ("rollout_s", "train_s", "rollout_nodes", "train_nodes")


def measure_tables(
    service: ServiceClient, table: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Tables of the scenario from a service: its jobs, its SLO, its requests in the median ten
    minutes of the week (written to `folder`), and the rates of its spot engines.
    """
    known = {job["name"]: job for job in table.get("jobs", ()) if isinstance(job, dict)}
    found: dict[str, Any] = {"jobs": _jobs(service.ask("GET", "/slackwater/coschedule"), known)}
    serving = service.ask("GET", "/slackwater/status").get("serving")
    requests = folder / "served.csv"
    requests.write_text(service.text("/slackwater/traces/served"))
    if serving is not None and requests.read_text().count("\n") > 1:
        slo = {name: serving["slo"][name] for name in ("ttft_s", "tpot_s")}
        write_typical(requests)
        found["serving"] = {**table.get("serving", {}), **slo, "trace": str(requests)}
    rows = csv.DictReader(service.text("/slackwater/traces/spot").splitlines())
    rates = spot_rates(
        [SpotEvent(float(row["t_s"]), row["event"], row["instance_id"]) for row in rows]
    )
    if rates is not None:
        spot = {name: value for name, value in table.get("spot", {}).items() if name != "trace"}
        found["spot"] = {**spot, "mean_nodes": rates[0], "removals_per_h": rates[1]}
    return found


def _jobs(state: Mapping[str, Any], known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The profile and the remaining iterations of unfinished jobs."""
    found = []
    for row in state["jobs"]:
        left = row["iterations"] - row["iterations_done"]
        if row["profile"] is None or left < 1:
            continue
        name = str(row["job"]).rpartition("/")[2]
        own = {key: value for key, value in known.get(name, {}).items() if key != "arrival_s"}
        profile = {key: row["profile"][key] for key in _PROFILE}
        found.append({**own, "name": name, "iterations": left, "slo": row["slo"], **profile})
    if not found:
        raise ConfigError(
            "--from-service: no job there has a profile; give one with [coschedule], whose jobs "
            "have made two iterations"
        )
    return found


def write_typical(path: Path) -> None:
    """Keep of a week's requests those of the median ten minutes that had any."""
    by_window = itertools.groupby(
        read_serving_trace(path, seconds=math.inf), lambda arrival: arrival.at_s // PERIOD_S
    )
    windows = sorted((list(arrivals) for _, arrivals in by_window), key=len)
    rows = (
        f"{each.at_s % PERIOD_S:.3f},{each.prompt_tokens},{each.output_tokens}\n"
        for each in windows[len(windows) // 2]
    )
    path.write_text("t_s,prompt_tokens,output_tokens\n" + "".join(rows))


def spot_rates(events: list[SpotEvent]) -> tuple[float, float] | None:
    """The mean number of spot engines, and removals of one per hour; None without a removal."""
    since_s: dict[str, float] = {}
    lived_s, removed = 0.0, 0
    for event in events:
        began_s = since_s.pop(event.instance_id, None)
        lived_s += 0.0 if began_s is None else event.t_s - began_s
        if event.event == "add":
            since_s[event.instance_id] = event.t_s
        else:
            removed += began_s is not None
    span_s = events[-1].t_s - events[0].t_s if events else 0.0
    lived_s += sum(events[-1].t_s - began_s for began_s in since_s.values())
    if not removed or lived_s <= 0:
        return None
    return lived_s / span_s, 3600 * removed / lived_s
