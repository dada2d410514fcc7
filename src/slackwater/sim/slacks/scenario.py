"""A fleet with five kinds of slack, as a user writes it down: pools, links, jobs and traces."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slackwater.model.config import decode, override
from slackwater.model.errors import ConfigError
from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.node import NodeType, Role
from slackwater.model.serving import ServingSlo
from slackwater.model.spot_trace import SpotEvent, read_spot_trace
from slackwater.policy.placement.fleet import FleetView
from slackwater.sim.inputs.scenario_file import PoolEntry, check_fits, read_table
from slackwater.sim.rollout.agent_trace import Session, draw_games
from slackwater.sim.rollout.engine_cost import MODELS, Accelerator, EngineCost, SharedDevice
from slackwater.sim.rollout.extra_capacity import SpotRates
from slackwater.sim.serving.serving_trace import Arrival, draw_arrivals, read_serving_trace

PERIOD_S = 600.0  # requests repeat after so long
_TOOL_S = 1.5  # the mean pause of the drawn trajectories


def _check(where: str, least: float = 0.0, **values: float) -> None:
    for name, value in values.items():
        if not least <= value < float("inf"):
            raise ConfigError.of(f"{where}: {name}", value, f"must be at least {least:g}")


def _check_above(where: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ConfigError.of(f"{where}: {name}", value, "must be above 0")


@dataclass(frozen=True, slots=True)
class SpotPool:
    """Preemptible nodes of the rollout pool's type: those of a trace, or drawn ones."""

    mean_nodes: float = 2.0
    removals_per_h: float = 12.0
    device_price_per_h: float = 2.0
    notice_s: float = 0.0
    trace: Path | None = None

    def __post_init__(self) -> None:
        _check_above("spot", mean_nodes=self.mean_nodes, removals_per_h=self.removals_per_h)
        _check("spot", device_price_per_h=self.device_price_per_h, notice_s=self.notice_s)


@dataclass(frozen=True, slots=True)
class ServingPool:
    """Nodes, of the rollout pool's type unless said, that serve a model of the same size under an
    SLO, to the requests of a trace or to drawn ones.
    """

    nodes: int = 2
    node_type: str | NodeType | None = None
    ttft_s: float = 0.5
    tpot_s: float = 0.15
    requests_per_s: float = 0.5
    trace: Path | None = None

    def __post_init__(self) -> None:
        _check("serving", 1, nodes=self.nodes)
        for name in ("ttft_s", "tpot_s", "requests_per_s"):
            _check_above("serving", **{name: getattr(self, name)})

    @property
    def slo(self) -> ServingSlo:
        return ServingSlo(self.ttft_s, self.tpot_s)


@dataclass(frozen=True, slots=True)
class ExternalPool:
    """Cores for tool calls and rewards; each action has one at a time."""

    cores: int = 24
    core_price_per_h: float = 0.05

    def __post_init__(self) -> None:
        _check("external", 1, cores=self.cores)
        _check("external", core_price_per_h=self.core_price_per_h)


@dataclass(frozen=True, slots=True)
class LinkEntry:
    """From trainers to engines: all pulls share `gb_per_s`; a step changes `changed_share` of the
    weights.
    """

    gb_per_s: float = 0.5
    changed_share: float = 0.03

    def __post_init__(self) -> None:
        _check_above("links", gb_per_s=self.gb_per_s, changed_share=self.changed_share)


@dataclass(frozen=True, slots=True)
class AgentJob:
    """A job whose trajectories call tools and are rewarded. `rollout_s` and `train_s` are what an
    iteration takes at worst on nodes of its own.
    """

    name: str
    rollout_s: float
    train_s: float
    iterations: int = 2
    slo: float = 2.0
    rollout_nodes: int = 1
    train_nodes: int = 1
    trajectories: int = 16
    max_turns: int = 6
    tool_s: float = 1.5
    reward_s: float = 4.0
    arrival_s: float = 0.0

    def __post_init__(self) -> None:
        where = f"job {self.name}"
        _check(where, 1, trajectories=self.trajectories, max_turns=self.max_turns)
        _check_above(where, tool_s=self.tool_s, reward_s=self.reward_s)

    def spec(self, model_billions: float) -> JobSpec:
        """As the co-scheduler sees it."""
        profile = JobProfile(
            self.rollout_s,
            self.train_s,
            rollout_nodes=self.rollout_nodes,
            train_nodes=self.train_nodes,
            model_billions=model_billions,
        )
        return JobSpec(JobId(self.name), self.arrival_s, self.iterations, self.slo, profile)

    def sessions(self, seed: Sequence[int]) -> list[Session]:
        """The trajectories of an iteration: the same whatever happens to the job."""
        scale = self.tool_s / _TOOL_S
        return [
            tuple(
                dataclasses.replace(turn, pause_s=turn.pause_s * scale + 1e-3)
                for turn in game[: self.max_turns]
            )
            for game in draw_games(self.trajectories, seed)
        ]


@dataclass(frozen=True, slots=True)
class SlackScenario:
    """A whole fleet. Without a kind of slack each job has nodes of its own (phases), no device is
    lent (serving), none is preemptible (spot), every trajectory reserves a core for its whole life
    (actions), and every version is shipped whole (weights).
    """

    rollout: PoolEntry
    train: PoolEntry
    jobs: tuple[AgentJob, ...]
    model: str = "8b"
    turns_per_device: int = 8
    policy: str = "interleaving"
    spot: SpotPool = field(default_factory=SpotPool)
    serving: ServingPool = field(default_factory=ServingPool)
    external: ExternalPool = field(default_factory=ExternalPool)
    links: LinkEntry = field(default_factory=LinkEntry)
    folder: Path = Path()

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ConfigError.of("model", self.model, f"must be {', '.join(MODELS)}")
        _check("file", 1, turns_per_device=self.turns_per_device)
        if not self.jobs:
            raise ConfigError("jobs: empty; list at least one under [[jobs]]")
        if len({job.name for job in self.jobs}) < len(self.jobs):
            raise ConfigError("jobs: name: is used twice; give every job its own")
        view = FleetView(self.rollout.pool(Role.ROLLOUT), self.train.pool(Role.TRAIN))
        for spec in self.specs():
            check_fits(spec, view, "jobs")

    def pools(self) -> dict[Role, PoolEntry]:
        """The two that jobs share."""
        return {Role.ROLLOUT: self.rollout, Role.TRAIN: self.train}

    def specs(self) -> tuple[JobSpec, ...]:
        """The jobs, by arrival."""
        found = [job.spec(MODELS[self.model].billions) for job in self.jobs]
        return tuple(sorted(found, key=lambda spec: (spec.arrival_s, spec.job)))

    def engine(self, role: Role = Role.ROLLOUT) -> EngineCost:
        """The costs of an engine on a node of that pool."""
        kinds = {Role.TRAIN: self.train.node_type, Role.SERVING: self.serving.node_type}
        kind = PoolEntry(kinds.get(role) or self.rollout.node_type).pool(role).node_type
        device = Accelerator(kind.name, kind.tflops, kind.hbm_gb, kind.hbm_tb_per_s)
        return EngineCost(MODELS[self.model], device, kind.devices)

    def serving_device(self) -> SharedDevice:
        """A device that serves and rolls out."""
        engine = self.engine(Role.SERVING)
        return SharedDevice(engine, engine)

    def spot_events(self, seed: int) -> tuple[SpotEvent, ...]:
        if self.spot.trace is not None:
            return read_spot_trace(self.folder / self.spot.trace)
        return SpotRates(self.spot.mean_nodes, self.spot.removals_per_h).draw(seed)

    def arrivals(self, seed: int) -> list[Arrival]:
        """The requests to the served model, which repeat."""
        served = self.serving
        if served.trace is not None:
            return read_serving_trace(self.folder / served.trace, seconds=PERIOD_S, seed=seed)
        return draw_arrivals(PERIOD_S, seed, rate=served.requests_per_s)


def read_slack_scenario(
    path: Path,
    assignments: Iterable[str] = (),
    measure: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> SlackScenario:
    """A file with the tables that `measure` makes of it, and `--set a.b=c`, put in; the paths in it
    start from its folder.
    """
    table, folder = read_table(str(path), "--slacks")
    table = override(table if measure is None else {**table, **measure(table)}, assignments)
    if "folder" in table:
        raise ConfigError("folder: is no key of the file; paths start from the file's folder")
    return dataclasses.replace(decode(SlackScenario, table), folder=folder)
