"""Multi-turn agents on dedicated engines: routing rules over pinned trajectories (ROSE 6.4, Table
3).

ROSE's rules start all trajectories at once. `affinity_capped` is affinity with a cap on live
trajectories, which somebody must choose: the best of `CAPS`, found by trying them all on the same
trajectories (`affinity_cap_MODEL`); its client also knows when a trajectory has ended. Ours is
given no number, and learns from the turns alone how many trajectories may be live
(`ours_over_best_cap_min` and `_mean`, over the models).

Trajectories of one prompt are copies of one session, of which ours learns more than it would of a
group's samples. Hence two more parts: in `scattered` copies differ, and in `unrelated` no two
trajectories share a prompt.
"""

from collections.abc import Sequence

from benchmarks.options import BenchOptions
from benchmarks.rollout.simulated.agent_run import AgentFleet, AgentResult, run_agents
from benchmarks.rollout.simulated.rules import AGENT_RULES
from benchmarks.rollout.simulated.sessions import (
    drawn_sessions,
    read_sessions,
    scattered,
    spread,
    unrelated,
)
from slackwater.sim.rollout.agent_trace import Session
from slackwater.sim.rollout.engine_cost import H800, QWEN3_8B, QWEN3_32B, EngineCost

MAX_CONTEXT_TOKENS = 32_768
# ROSE section 6: 8 dedicated GPUs with TP 1 and 256 trajectories; 16 with TP 4 and 1024.
FLEETS = {
    "8b": (AgentFleet(EngineCost(QWEN3_8B, H800, 1), 8), 256),
    "32b": (AgentFleet(EngineCost(QWEN3_32B, H800, 4), 4), 1024),
}
ROUTINGS = ("pinned", "round_robin", "turn_wise", "affinity", "ours")
CAPS = (32, 48, 64, 80, 96, 112, 128, 160, 192)
PARTS = ("copies", "scattered", "unrelated")
TRACE = "agents/swerebench_glm47flash_turns_dev.csv.gz"


def agent_sessions(options: BenchOptions) -> tuple[Session, ...]:
    if options.data is None:
        return drawn_sessions(64, options.seed, max_context_tokens=MAX_CONTEXT_TOKENS)
    return read_sessions(options.data_file(TRACE), max_context_tokens=MAX_CONTEXT_TOKENS)


def trajectories_of(sessions: Sequence[Session], part: str, seed: int) -> list[Session]:
    """What a part runs."""
    if part == "copies":
        return list(sessions)
    changed = scattered(sessions, seed)
    return changed if part == "scattered" else unrelated(changed)


def run(options: BenchOptions) -> dict[str, float]:
    """Speed-ups of the rollout stage over pinned trajectories, and the share of prompts prefilled
    anew. All rules run for `copies`; for other parts, ours and affinity with caps.
    """
    sessions = agent_sessions(options)
    figures: dict[str, float] = {}
    for part in filter(options.wants, PARTS):
        suffix = "" if part == "copies" else f"_{part}"
        found: dict[str, float] = {}
        for index, (model, (fleet, trajectories)) in enumerate(FLEETS.items()):
            options.progress(f"{part} {model}", index / len(FLEETS))
            count = trajectories // 8 if options.quick else trajectories
            drawn = spread(sessions, count, options.seed)
            drawn = trajectories_of(drawn, part, options.seed)
            names = ROUTINGS if part == "copies" else ("ours",)
            results = {name: run_agents(fleet, AGENT_RULES[name], drawn) for name in names}
            if part == "copies":
                found |= _figures(model, results)
            found |= _capped(model, fleet, drawn, results["ours"], options.quick)
        over = [found[f"ours_over_affinity_capped_{model}"] for model in FLEETS]
        found |= {
            "ours_over_best_cap_min": min(over),
            "ours_over_best_cap_mean": sum(over) / len(over),
        }
        figures |= {f"{name}{suffix}": value for name, value in found.items()}
    return figures


def _capped(
    model: str, fleet: AgentFleet, drawn: Sequence[Session], ours: AgentResult, quick: bool
) -> dict[str, float]:
    """Affinity with the best of some caps, chosen with hindsight."""
    caps = [max(cap // 8, 2) for cap in CAPS] if quick else list(CAPS)
    tried = {
        cap: run_agents(fleet, AGENT_RULES["affinity"], drawn, most_live=cap).seconds
        for cap in caps
    }
    best = min(tried, key=lambda cap: tried[cap])
    return {
        f"affinity_cap_{model}": float(best),
        f"ours_over_affinity_capped_{model}": tried[best] / ours.seconds,
        **{
            f"ours_over_affinity_capped_{cap}_{model}": seconds / ours.seconds
            for cap, seconds in tried.items()
        },
    }


def _figures(model: str, results: dict[str, AgentResult]) -> dict[str, float]:
    pinned_s = results["pinned"].seconds
    figures: dict[str, float] = {f"pinned_s_{model}": pinned_s}
    for name, result in results.items():
        if name != "pinned":
            figures[f"{name}_over_pinned_{model}"] = pinned_s / result.seconds
        figures[f"{name}_prefilled_share_{model}"] = result.prefilled_share
    best_s = min(result.seconds for name, result in results.items() if name != "ours")
    figures[f"ours_over_best_{model}"] = best_s / results["ours"].seconds
    return figures
