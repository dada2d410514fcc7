"""What-if questions: how would another fleet or another SLO change the current jobs?

`slackwater plan` answers them in its own process, so that the service's event loop is not blocked.
"""

import asyncio
import csv
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from slackwater.model.errors import RefusedError, UnavailableError
from slackwater.model.toml_text import toml_text
from slackwater.serve.dashboard.source import PlannedFleet, PlannedJob

_LIMIT_S = 300.0
_MAX_PLANS = 32
_SHORTEST_S = 1.0  # the shortest phase that the planner accepts


class FleetChange(BaseModel):
    """A change of the fleet: more or fewer nodes, no spot capacity, one SLO for every job."""

    model_config = ConfigDict(extra="forbid")
    rollout_nodes: Annotated[int, Field(ge=-4096, le=4096)] = 0
    train_nodes: Annotated[int, Field(ge=-4096, le=4096)] = 0
    without_spot: bool = False
    slo: Annotated[float, Field(ge=1, le=100)] | None = None

    def apply(self, fleet: PlannedFleet) -> PlannedFleet:
        """The fleet after this change."""
        lost = fleet.spot_nodes if self.without_spot else 0
        jobs = fleet.jobs
        if self.slo is not None:
            jobs = tuple(dataclasses.replace(job, slo=self.slo) for job in jobs)
        return dataclasses.replace(
            fleet,
            rollout_nodes=max(fleet.rollout_nodes - lost + self.rollout_nodes, 0),
            train_nodes=max(fleet.train_nodes + self.train_nodes, 0),
            jobs=jobs,
        )


class Planner:
    """Computes one plan at a time and caches the last ones."""

    def __init__(self) -> None:
        self._free = asyncio.Lock()
        self._plans: dict[PlannedFleet, dict[str, Any]] = {}

    async def compare(self, fleet: PlannedFleet, change: FleetChange) -> dict[str, Any]:
        """The plan of the current fleet (`now`) and of the changed one (`then`)."""
        changed = change.apply(fleet)
        if not changed.rollout_nodes or not changed.train_nodes:
            raise RefusedError("nodes: at least one that rolls out and one that trains must remain")
        async with self._free:
            return {"now": await self._plan(fleet), "then": await self._plan(changed)}

    async def _plan(self, fleet: PlannedFleet) -> dict[str, Any]:
        if fleet not in self._plans:
            with tempfile.TemporaryDirectory(prefix="slackwater-plan-") as folder:
                self._plans[fleet] = await _run_planner(Path(folder), fleet)
            while len(self._plans) > _MAX_PLANS:
                del self._plans[next(iter(self._plans))]
        return self._plans[fleet]


async def _run_planner(folder: Path, fleet: PlannedFleet) -> dict[str, Any]:
    (folder / "fleet.toml").write_text(toml_text(_fleet_table(fleet)))
    with (folder / "jobs.csv").open("w", newline="") as file:
        names = [field.name for field in dataclasses.fields(fleet.jobs[0])]
        table = csv.DictWriter(file, names)
        table.writeheader()
        table.writerows(dataclasses.asdict(job) for job in scale_to_planner_units(fleet.jobs))
    files = ["--fleet", str(folder / "fleet.toml"), "--jobs", str(folder / "jobs.csv")]
    command = [sys.executable, "-m", "slackwater", "plan", *files, "--json"]
    process = await asyncio.create_subprocess_exec(
        *command,
        "--policy",
        fleet.placement,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), _LIMIT_S)
    except TimeoutError:
        raise UnavailableError(f"the planner took more than {_LIMIT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        raise RefusedError(f"the planner refused: {' '.join(last)[:300]}")
    return _summary(fleet, json.loads(output))


def scale_to_planner_units(jobs: Sequence[PlannedJob]) -> list[PlannedJob]:
    """Scale all times by one factor, so that no phase is shorter than the planner accepts.

    Small models have phases of fractions of a second; slowdowns do not depend on the unit.
    """
    shortest_s = min(min(job.rollout_s, job.train_s) for job in jobs)
    factor = _SHORTEST_S / min(max(shortest_s, 1e-3), _SHORTEST_S)
    return [
        dataclasses.replace(
            job,
            rollout_s=max(factor * job.rollout_s, _SHORTEST_S),
            train_s=max(factor * job.train_s, _SHORTEST_S),
            sync_s=factor * job.sync_s,
        )
        for job in jobs
    ]


def _fleet_table(fleet: PlannedFleet) -> dict[str, Any]:
    """A fleet file in which all nodes cost the same: the plans compare numbers of nodes."""
    kind = {
        "name": "node",
        "devices": 1,
        "device_price_per_h": 1.0,
        "host_memory_gb": fleet.host_memory_gb,
        "tflops": 1.0,
        "hbm_gb": 1.0,
        "hbm_tb_per_s": 1.0,
    }
    return {
        "rollout": {"max_nodes": fleet.rollout_nodes, "node_type": kind},
        "train": {"max_nodes": fleet.train_nodes, "node_type": kind},
    }


def _summary(fleet: PlannedFleet, figures: dict[str, Any]) -> dict[str, Any]:
    placed = [job for group in figures["groups"] for job in group["jobs"]]
    slowdowns = [job["slowdown"] for job in placed]
    used = {
        node
        for group in figures["groups"]
        for node in (*group["rollout_nodes"], *group["train_nodes"])
    }
    return {
        "rollout_nodes": fleet.rollout_nodes,
        "train_nodes": fleet.train_nodes,
        "jobs": figures["jobs"],
        "placed": figures["placed"],
        "nodes_used": len(used),
        "nodes_alone": round(figures["alone_price_per_h"]),
        "slo_kept": figures["slo_attainment"],
        "mean_slowdown": sum(slowdowns) / max(len(slowdowns), 1),
        "per_job": {
            job["job"]: {"slowdown": job["slowdown"], "slo": job["slo"], "group": group["group"]}
            for group in figures["groups"]
            for job in group["jobs"]
        },
        "refusals": figures["refusals"],
    }
