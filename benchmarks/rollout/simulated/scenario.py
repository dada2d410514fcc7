"""Rollout scenarios: TOML in, results under each rule out. Shipped: `scenarios/*.toml`.

Two kinds: `spot` (one job in steps, training nodes and spot instances) and `agents` (one rollout
stage of multi-turn trajectories on dedicated engines, perhaps with capacity beside them). Paths
are relative to the file.
"""

import difflib
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.rollout.simulated.agent_run import AgentFleet, run_agents
from benchmarks.rollout.simulated.extra_capacity import (
    CombinedCapacity,
    ExtraCapacity,
    LeasedFunctions,
    LentServing,
)
from benchmarks.rollout.simulated.response_lengths import log_normal
from benchmarks.rollout.simulated.rules import AGENT_RULES, SPOT_RULES
from benchmarks.rollout.simulated.sessions import drawn_sessions, read_sessions, spread
from benchmarks.rollout.simulated.spot_run import SETUPS, SpotSetup, run_spot
from benchmarks.rollout.simulated.trainer import TrainingStepPlan
from slackwater.model.config import decode, override
from slackwater.model.errors import ConfigError
from slackwater.model.spot_trace import SpotEvent, read_spot_trace
from slackwater.sim.rollout.engine_cost import H800, MODELS, EngineCost
from slackwater.sim.rollout.extra_capacity import SpotCapacity, SpotRates


@dataclass(frozen=True, slots=True)
class SpotEntry:
    """A trace file, or rates to draw one from, or events written down."""

    file: Path | None = None
    drawn: SpotRates | None = None
    events: tuple[SpotEvent, ...] = ()

    def trace(self, folder: Path, seed: int) -> tuple[SpotEvent, ...]:
        if self.file is not None:
            return read_spot_trace(folder / self.file)
        return self.drawn.draw(seed) if self.drawn is not None else self.events


@dataclass(frozen=True, slots=True)
class ResponseEntry:
    """A step's responses: log-normal lengths, cut at the limit."""

    turns: int = 1024
    median_tokens: float = 4800.0
    sigma: float = 0.75
    limit_tokens: int = 14_336
    min_batch: int = 32


@dataclass(frozen=True, slots=True)
class SessionEntry:
    """Trajectories: a file of agents' turns, or drawn ones."""

    count: int = 256
    file: Path | None = None
    max_context_tokens: int = 32_768


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """Dedicated engines for agents, and devices lent, leased or spot beside them."""

    count: int = 8
    devices: int = 1
    turns_per_device: int = 16
    lent: int = 0
    leased: int = 0


@dataclass(frozen=True, slots=True)
class RolloutScenario:
    """One experiment."""

    name: str
    kind: Literal["spot", "agents"]
    model: str
    rules: tuple[str, ...]
    description: str = ""
    seconds: float = 7200.0
    seed: int = 0
    spot: SpotEntry = field(default_factory=SpotEntry)
    responses: ResponseEntry = field(default_factory=ResponseEntry)
    sessions: SessionEntry = field(default_factory=SessionEntry)
    engines: EngineEntry = field(default_factory=EngineEntry)

    def __post_init__(self) -> None:
        known = SPOT_RULES if self.kind == "spot" else AGENT_RULES
        for rule in self.rules:
            if rule not in known:
                raise ConfigError.of("rules", rule, f"must be of: {', '.join(known)}")
        if self.model not in MODELS:
            raise ConfigError.of("model", self.model, f"must be of: {', '.join(MODELS)}")
        if self.seconds <= 0:
            raise ConfigError.of("seconds", self.seconds, "must be above 0")


def read_rollout_scenario(source: str, sets: Iterable[str] = ()) -> tuple[RolloutScenario, Path]:
    """A file, or a shipped scenario by its name, with `a.b=c` put in; and the folder its paths
    start from.
    """
    table, folder = _table(source)
    return decode(RolloutScenario, override(table, sets)), folder


def shipped_rollout_scenarios() -> dict[str, dict[str, Any]]:
    """The tables beside this file, by name."""
    return {
        file.stem: tomllib.loads(file.read_text(encoding="utf-8"))
        for file in sorted((Path(__file__).parent / "scenarios").glob("*.toml"))
    }


def _table(source: str) -> tuple[dict[str, Any], Path]:
    path = Path(source)
    if path.suffix != ".toml" and not path.exists():
        shipped = shipped_rollout_scenarios()
        if source in shipped:
            return shipped[source], Path()
        close = difflib.get_close_matches(source, shipped, n=1)
        fix = f"did you mean {close[0]}?" if close else f"shipped: {', '.join(shipped)}"
        raise ConfigError.of("FILE", source, f"is no .toml file and no shipped scenario; {fix}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")), path.parent
    except OSError as error:
        raise ConfigError.of("FILE", source, f"cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name}: is not TOML: {error}") from None


def run_rollout_scenario(
    scenario: RolloutScenario, folder: Path, progress: Callable[[str, float], None]
) -> dict[str, dict[str, float]]:
    """Figures by rule."""
    results: dict[str, dict[str, float]] = {}
    for number, rule in enumerate(scenario.rules):
        progress(rule, number / len(scenario.rules))
        run = _run_spot if scenario.kind == "spot" else _run_agents
        results[rule] = run(scenario, folder, rule)
    return results


def _run_spot(scenario: RolloutScenario, folder: Path, rule: str) -> dict[str, float]:
    wanted = scenario.responses
    lengths = log_normal(wanted.median_tokens, wanted.sigma, wanted.limit_tokens)
    plan = TrainingStepPlan(
        wanted.turns, max_tokens=wanted.limit_tokens, min_batch=wanted.min_batch
    )
    setup = SpotSetup(*SETUPS[scenario.model], lengths, plan)
    trace = scenario.spot.trace(folder, scenario.seed)
    result = run_spot(setup, SPOT_RULES[rule], trace, seconds=scenario.seconds, seed=scenario.seed)
    return {
        "tokens_per_s": result.tokens_per_s,
        "tokens_per_dollar": result.tokens_per_dollar,
        "steps": float(len(result.steps)),
        "mean_spot_instances": result.mean_remote,
        "moved_turns": float(result.moved_turns),
    }


def _run_agents(scenario: RolloutScenario, folder: Path, rule: str) -> dict[str, float]:
    wanted, engines, seed = scenario.sessions, scenario.engines, scenario.seed
    limit = wanted.max_context_tokens
    sessions = (
        drawn_sessions(64, seed, max_context_tokens=limit)
        if wanted.file is None
        else read_sessions(folder / wanted.file, max_context_tokens=limit)
    )
    engine = EngineCost(MODELS[scenario.model], H800, engines.devices)
    fleet = AgentFleet(engine, engines.count, engines.turns_per_device)
    extra: list[ExtraCapacity] = [SpotCapacity(scenario.spot.trace(folder, seed))]
    if engines.lent:
        extra.append(LentServing(engines.lent, seed))
    if engines.leased:
        extra.append(LeasedFunctions(engines.leased))
    drawn = spread(sessions, wanted.count, seed)
    result = run_agents(fleet, AGENT_RULES[rule], drawn, CombinedCapacity(extra))
    return {
        "seconds": result.seconds,
        "turns": float(result.turns),
        "output_tokens_per_s": result.output_tokens / result.seconds,
    }
