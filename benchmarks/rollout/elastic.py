"""Agents on 8 dedicated engines with capacity beside them, head to head (ROSE 6.1, Appendix E): a
fixed pool, serverless-like leases, RLBoost's rules on spot, ROSE's rules on lent serving devices,
and ours on each. The part `split` asks what a step gains if devices that the tail leaves idle train
meanwhile: at most, and with a trainer of fixed size as it runs live.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean

from benchmarks.options import BenchOptions
from benchmarks.rollout.routing import FLEETS, MAX_CONTEXT_TOKENS, TRACE, agent_sessions
from benchmarks.rollout.simulated.agent_run import AgentFleet, run_agents
from benchmarks.rollout.simulated.extra_capacity import (
    CombinedCapacity,
    ExtraCapacity,
    LeasedFunctions,
    LentServing,
)
from benchmarks.rollout.simulated.rules import AGENT_RULES
from benchmarks.rollout.simulated.sessions import read_sessions, spread
from benchmarks.rollout.simulated.split_run import SplitPlan, run_split
from benchmarks.rollout.split import step_figures
from benchmarks.rollout.spot_places import DRAWN_SEGMENTS
from slackwater.model.spot_trace import SpotEvent, read_spot_trace
from slackwater.policy.rollout.seeding import AdaptiveWindow, ColocatedSeeding
from slackwater.sim.rollout.agent_trace import Session
from slackwater.sim.rollout.extra_capacity import SpotCapacity

LENT = 16
OVERLAP = 16  # trajectories of a micro-batch at least
STEPS = 3  # in which rules learn from one another
PARTS = ("capacity", "split")
TRACES = {"": TRACE, "_b": "agents/swebench_deepseekv32_turns_dev.csv.gz"}


def _spot(options: BenchOptions) -> tuple[SpotEvent, ...]:
    """Segment B, as ROSE Appendix B takes it; its instances have two devices each, here two
    engines.
    """
    if options.data is None:
        events = DRAWN_SEGMENTS["B"].draw(options.seed)
    else:
        path = options.data_file("spot/rlboost_like_segment_B_dev.csv.gz")
        events = read_spot_trace(path)
    return tuple(
        SpotEvent(row.t_s, row.event, f"{row.instance_id}.{device}")
        for row in events
        for device in range(2)
    )


def run(options: BenchOptions) -> dict[str, float]:
    figures: dict[str, float] = {}
    if options.wants("capacity"):
        figures |= _capacity(options)
    if options.wants("split"):
        figures |= _split(options)
    return figures


def _split(options: BenchOptions) -> dict[str, float]:
    """`step_figures` for each model and public trace; for drawn sessions without `--data`."""
    figures: dict[str, float] = {}
    traces: Mapping[str, str | None] = {"": None} if options.data is None else TRACES
    for suffix, trace in traces.items():
        if trace is None:
            sessions = agent_sessions(options)
        else:
            path = options.data_file(trace)
            sessions = read_sessions(path, max_context_tokens=MAX_CONTEXT_TOKENS)
        for model, (fleet, trajectories) in FLEETS.items():
            count = trajectories // 4 if options.quick else trajectories
            seeds = range(options.seed, options.seed + (1 if options.quick else STEPS))
            steps = [spread(sessions, count, seed) for seed in seeds]
            result = run_agents(fleet, AGENT_RULES["ours"], steps[0])
            found = step_figures(fleet, result) | _fixed_figures(fleet, steps)
            figures |= {f"split_{name}_{model}{suffix}": value for name, value in found.items()}
    return figures


def _fixed_figures(fleet: AgentFleet, steps: Sequence[Sequence[Session]]) -> dict[str, float]:
    """Seconds of a step with a trainer on the devices of half the engines, if training begins when
    the rollout is over; and how many times shorter the live rules make it with micro-batches beside
    the rollout: ours, RLBoost's, and RLBoost's with training in the order of prompts.
    """
    local, ours = fleet.engines // 2, AGENT_RULES["ours"]
    window = replace(ours, seeding=AdaptiveWindow(), trainer_patience_s=1e6)
    beside = SplitPlan(local, overlap=OVERLAP)
    ways = {
        "after": (replace(ours, seeding=ColocatedSeeding()), SplitPlan(local)),
        "balanced": (ours, beside),
        "window": (window, beside),
        "in_order": (window, replace(beside, in_order=True)),
    }
    seconds = {
        name: mean(step.step_s for step in run_split(fleet, settings, steps, plan))
        for name, (settings, plan) in ways.items()
    }
    after_s = seconds.pop("after")
    ratios = {f"fixed_{name}": after_s / value for name, value in seconds.items()}
    return {"fixed_step_s": after_s, **ratios}


def _capacity(options: BenchOptions) -> dict[str, float]:
    """Seconds of one rollout stage under each, and speed-ups over the fixed pool."""
    fleet, trajectories = FLEETS["8b"]
    count = trajectories // 4 if options.quick else 2 * trajectories
    sessions = spread(agent_sessions(options), count, options.seed)
    spot = SpotCapacity(_spot(options))
    lent = LentServing(LENT, options.seed)
    cases: dict[str, tuple[str, ExtraCapacity | None]] = {
        "fixed": ("turn_wise", None),
        "fixed_ours": ("ours", None),
        "serverless": ("turn_wise", LeasedFunctions(LENT)),
        "rlboost_spot": ("rlboost", spot),
        "ours_spot": ("ours", spot),
        "rose_lent": ("affinity", lent),
        "ours_lent": ("ours", lent),
        "ours_lent_and_spot": ("ours", CombinedCapacity((lent, spot))),
    }
    for devices in (4, 8):
        cases[f"rose_lent_{devices}"] = ("affinity", LentServing(devices, options.seed))
    seconds: dict[str, float] = {}
    for number, (name, (rule, extra)) in enumerate(cases.items()):
        options.progress(name, number / len(cases))
        seconds[name] = run_agents(fleet, AGENT_RULES[rule], sessions, extra).seconds
    figures = {f"{name}_s": value for name, value in seconds.items()}
    figures |= {
        f"{name}_over_fixed": seconds["fixed"] / value
        for name, value in seconds.items()
        if name != "fixed"
    }
    figures["ours_over_rlboost_on_spot"] = seconds["rlboost_spot"] / seconds["ours_spot"]
    figures["ours_over_rose_on_lent"] = seconds["rose_lent"] / seconds["ours_lent"]
    return figures
