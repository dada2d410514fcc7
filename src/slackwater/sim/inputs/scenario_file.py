"""Scenario files: TOML in, a `ClusterScenario` out. Only jobs or a workload are required;
docs/reference/scenario-files.md lists the keys. Paths are relative to the file.
"""

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from slackwater.model.config import decode, override
from slackwater.model.device import layout_devices
from slackwater.model.errors import ConfigError, check_above_zero
from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec, SloScope
from slackwater.model.node import KNOWN_NODE_TYPES, NodeType, Pool, Role
from slackwater.model.switching import SwitchCosts
from slackwater.model.toml_text import read_toml
from slackwater.policy.placement.fleet import FleetView
from slackwater.sim.cluster.generate import rollout_state_gb, train_state_gb
from slackwater.sim.cluster.scenario import (
    ClusterScenario,
    DriftConfig,
    FaultConfig,
    LengthConfig,
    PolicyConfig,
    TailConfig,
    Workload,
)
from slackwater.sim.cluster.workload import ProfileWorkload
from slackwater.sim.inputs.csv_rows import read_rows
from slackwater.sim.inputs.traces import read_jobs_trace, read_lengths


@dataclass(frozen=True, slots=True)
class JobTable:
    """One job as a person writes it: a `[[jobs]]` table, or a row of `jobs.csv`.

    Worst-case phase lengths and the slowdown that is tolerated; state sizes follow the model's
    size unless given. A job with layouts, such as tp=2,dp=4, has as many devices as those have
    ranks, and no more nodes than hold them.
    """

    job: str
    rollout_s: float
    train_s: float
    slo: float
    iterations: int = 100
    arrival_s: float = 0.0
    sync_s: float = 0.0
    rollout_nodes: int = 1
    train_nodes: int = 1
    model_billions: float = 7.0
    rollout_state_gb: float | None = None
    train_state_gb: float | None = None
    slo_scope: SloScope = "job"
    rollout_layout: str = ""
    train_layout: str = ""

    def __post_init__(self) -> None:
        if not self.job.strip():
            raise ConfigError.of("job", self.job, "must be a name")
        self.spec()  # what the job's own types refuse is refused here, where the line is known

    def spec(self) -> JobSpec:
        """The job as the co-scheduler sees it."""
        billions = self.model_billions
        rollout_gb, train_gb = self.rollout_state_gb, self.train_state_gb
        profile = JobProfile(
            rollout_s=self.rollout_s,
            train_s=self.train_s,
            sync_s=self.sync_s,
            rollout_nodes=self.rollout_nodes,
            train_nodes=self.train_nodes,
            rollout_state_gb=rollout_state_gb(billions) if rollout_gb is None else rollout_gb,
            train_state_gb=train_state_gb(billions) if train_gb is None else train_gb,
            model_billions=billions,
            rollout_devices=layout_devices(self.rollout_layout, "rollout_layout"),
            train_devices=layout_devices(self.train_layout, "train_layout"),
        )
        return JobSpec(
            job=JobId(self.job),
            arrival_s=self.arrival_s,
            iterations=self.iterations,
            slo=self.slo,
            profile=profile,
            slo_scope=self.slo_scope,
        )


def read_jobs(path: Path) -> tuple[JobSpec, ...]:
    """Jobs of a CSV file, each id used once."""
    jobs: dict[JobId, JobSpec] = {}
    for entry in read_rows(path, JobTable):
        spec = entry.spec()
        if spec.job in jobs:
            raise ConfigError.of(f"{path.name}: job", entry.job, "is used twice; give each its own")
        jobs[spec.job] = spec
    if not jobs:
        raise ConfigError.of("--jobs", str(path), "must hold at least one job")
    return tuple(jobs.values())


_QUANTILES = 201


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """How many nodes of which type can be rented; a type is a known name or a table of its own."""

    node_type: str | NodeType
    max_nodes: int = 4096
    owned: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.node_type, str) and self.node_type not in KNOWN_NODE_TYPES:
            known = ", ".join(KNOWN_NODE_TYPES)
            raise ConfigError.of("node_type", self.node_type, f"must be {known}, or a table")

    def pool(self, role: Role) -> Pool:
        kind = self.node_type
        known = KNOWN_NODE_TYPES[kind] if isinstance(kind, str) else kind
        return Pool(role, known, self.max_nodes, self.owned)


@dataclass(frozen=True, slots=True)
class FleetEntry:
    """The two pools that jobs share."""

    rollout: PoolEntry
    train: PoolEntry

    def pools(self) -> tuple[Pool, ...]:
        """As a scenario holds them."""
        return (self.rollout.pool(Role.ROLLOUT), self.train.pool(Role.TRAIN))


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """Public traces: arrivals and durations of `limit` jobs for a workload of kind "profiles", and
    response lengths as shares of `limit_tokens` (the longest, unless given).
    """

    jobs: Path | None = None
    limit: int = 300
    lengths: Path | None = None
    limit_tokens: float | None = None

    def __post_init__(self) -> None:
        check_above_zero("", self, "limit")
        if self.limit_tokens is not None:
            check_above_zero("", self, "limit_tokens")


@dataclass(frozen=True, slots=True)
class ScenarioFile:
    """One file, as written."""

    name: str
    description: str = ""
    seed: int = 0
    fleet: FleetEntry = field(
        default_factory=lambda: FleetEntry(PoolEntry("H20"), PoolEntry("H800"))
    )
    jobs: tuple[JobTable, ...] = ()
    workload: Workload | None = None
    trace: TraceEntry | None = None
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    compare: tuple[str, ...] = ()
    lengths: LengthConfig = field(default_factory=LengthConfig)
    tail: TailConfig = field(default_factory=TailConfig)
    switching: SwitchCosts = field(default_factory=SwitchCosts)
    faults: FaultConfig = field(default_factory=FaultConfig)
    drift: DriftConfig = field(default_factory=DriftConfig)

    def scenario(self, folder: Path) -> ClusterScenario:
        """With traces read from `folder`, and checked: every listed job fits the empty fleet."""
        scenario = ClusterScenario(
            name=self.name,
            fleet=self.fleet.pools(),
            jobs=tuple(entry.spec() for entry in self.jobs),
            workload=self._workload(folder),
            policy=self.policy,
            lengths=self._lengths(folder),
            tail=self.tail,
            switching=self.switching,
            faults=self.faults,
            drift=self.drift,
            seed=self.seed,
        )
        fleet = scenario.view()
        for number, spec in enumerate(scenario.jobs):
            check_fits(spec, fleet, f"jobs[{number}]")
        return scenario

    def _workload(self, folder: Path) -> Workload | None:
        if self.trace is None or self.trace.jobs is None:
            return self.workload
        if not isinstance(self.workload, ProfileWorkload):
            raise ConfigError.of(
                "trace.jobs", str(self.trace.jobs), 'needs [workload] with kind = "profiles"'
            )
        traced = read_jobs_trace(folder / self.trace.jobs, self.trace.limit)
        arrivals = tuple((job.arrival_s, job.duration_s) for job in traced)
        return dataclasses.replace(self.workload, jobs=len(arrivals), arrivals=arrivals)

    def _lengths(self, folder: Path) -> LengthConfig:
        if self.trace is None or self.trace.lengths is None:
            return self.lengths
        traced = read_lengths(folder / self.trace.lengths)
        quantiles = traced.shares_of(self.trace.limit_tokens or traced.limit_tokens, _QUANTILES)
        return dataclasses.replace(self.lengths, kind="quantiles", quantiles=quantiles)


def check_fits(spec: JobSpec, fleet: FleetView, at: str) -> None:
    """Refuse a job that would not run even with the whole fleet to itself."""
    why = fleet.explain_infeasible(spec.profile)
    if why is not None:
        raise ConfigError(f"{at}: job {spec.job!r} fits nowhere: it {why}")


def load_shipped_scenarios() -> Mapping[str, ScenarioFile]:
    """The cluster scenarios that come with the package, by name."""
    return {
        name: decode(ScenarioFile, table) for name, (table, _) in _load_shipped_tables().items()
    }


def read_table(source: str, field: str = "FILE") -> tuple[dict[str, Any], Path]:
    """The table of a file or shipped scenario, and the folder that its paths are relative to."""
    path = Path(source)
    if path.suffix != ".toml" and not path.exists():
        shipped = _load_shipped_tables()
        if source not in shipped:
            close = difflib.get_close_matches(source, shipped, n=1)
            fix = f"did you mean {close[0]}?" if close else f"shipped: {', '.join(shipped)}"
            raise ConfigError.of(field, source, f"is no .toml file and no shipped scenario; {fix}")
        return shipped[source]
    return read_toml(field, path), path.parent


def read_scenario(source: str, assignments: Iterable[str] = ()) -> tuple[ScenarioFile, Path]:
    """A file or shipped scenario with `--set a.b=c` put in."""
    table, folder = read_table(source)
    return decode(ScenarioFile, override(table, assignments)), folder


def read_fleet(path: Path, assignments: Iterable[str] = ()) -> FleetEntry:
    """`fleet.toml`: the tables `[rollout]` and `[train]`, or the same under `[fleet]`."""
    table, _ = read_table(str(path), "--fleet")
    inner = override(table, assignments)
    if "fleet" in inner and not {"rollout", "train"} & inner.keys():
        return decode(FleetEntry, inner["fleet"], "fleet")
    return decode(FleetEntry, inner)


def _load_shipped_tables() -> dict[str, tuple[dict[str, Any], Path]]:
    tables = {}
    folder = resources.files("slackwater") / "scenarios"
    for file in sorted(folder.iterdir(), key=lambda item: item.name):
        name = file.name.removesuffix(".toml")
        if file.name.endswith(".toml"):
            tables[name] = (tomllib.loads(file.read_text(encoding="utf-8")), Path())
    return tables
