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
from slackwater.model.errors import ConfigError, check_above_zero
from slackwater.model.job import JobSpec
from slackwater.model.node import KNOWN_NODE_TYPES, NodeType, Pool, Role
from slackwater.model.switching import SwitchCosts
from slackwater.model.toml_text import read_toml
from slackwater.policy.placement.fleet import FleetView
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
from slackwater.sim.inputs.job_entry import JobTable
from slackwater.sim.inputs.traces import read_jobs_trace, read_lengths

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
    why = fleet.why_never(spec.profile)
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
