"""The same 256-turn workload with and without faults, on real engine processes: every token
compared.

The disturbed run is hit at random moments (drawn over its tokens, so that all of them fall into the
work): engines are killed with SIGKILL while they run turns, others get a notice, replacements join
in mid-step, and a balancing policy that needs no reason moves running turns about all the time. Its
record is then replayed through a fresh manager.
"""

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.options import BenchOptions
from benchmarks.rollout.moving_always import MovingAlways
from harness.live_fleet import FleetPlan, LiveFleet
from harness.multi_turn import MultiTurn, Outputs, compare
from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import EVENT_TYPES
from slackwater.control.record import replay
from slackwater.control.rollout.settings import RolloutSettings

_DEADLINE_S = 1800.0
_NOTICE_S = 2.0


@dataclass(slots=True)
class Faults:
    """What to do to the fleet and when: at shares of the tokens to be made."""

    kills: int
    notices: int
    seed: int
    done_kills: int = 0
    done_notices: int = 0
    joins: int = 0
    moments: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        shares = np.sort(rng.uniform(0.02, 0.93, self.kills + self.notices))
        noticed = set(rng.choice(len(shares), self.notices, replace=False).tolist())
        self.moments = [
            (float(share), "notice" if place in noticed else "kill")
            for place, share in enumerate(shares)
        ]


def run(options: BenchOptions) -> dict[str, float]:
    """Figures of one undisturbed and one disturbed run."""
    from slackwater.zoo.tiny import make_model

    workload = MultiTurn(options.seed, trajectories=16 if options.quick else 64)
    faults = Faults(6 if options.quick else 32, 1 if options.quick else 4, options.seed)
    with tempfile.TemporaryDirectory(prefix="slackwater-kills-") as folder:
        model = Path(folder) / "model"
        make_model("small", model, seed=options.seed)
        plan = FleetPlan(model, Path(folder), max_running=32)
        return asyncio.run(disturbed_and_not(plan, workload, faults, options))


async def disturbed_and_not(
    plan: FleetPlan, workload: MultiTurn, faults: Faults, options: BenchOptions
) -> dict[str, float]:
    """Run the workload twice, compare, and replay the record of the second."""
    loop = asyncio.get_running_loop()
    lines: list[bytes] = []
    async with asyncio.timeout(_DEADLINE_S):
        options.progress("undisturbed", 0.0)
        async with LiveFleet(plan) as fleet:
            fleet.provider.start(2)
            await fleet.until_ready(2)
            calm_s = loop.time()
            wanted = await workload.run(fleet.floor.generate)
            calm_s = loop.time() - calm_s
        settings = RolloutSettings(
            balancing=MovingAlways(),
            balance_every_s=0.2,
            watch_every_s=0.1,
            max_losses_without_progress=50,
        )
        async with LiveFleet(plan, settings, lines.append) as fleet:
            fleet.provider.start(3)
            await fleet.until_ready(1)
            stormy_s = loop.time()
            got = await _stormy(fleet, workload, faults, _tokens(wanted), options)
            stormy_s = loop.time() - stormy_s
            gauges = fleet.floor.manager.gauges()
            fleet.floor.controller.check_integrity()
    difference = compare(wanted, got)
    agreed, divergence = replay(FleetController(settings), lines, EVENT_TYPES)
    return {
        "turns": float(workload.total_turns),
        "tokens": float(_tokens(wanted)),
        "kills": float(faults.done_kills),
        "notices": float(faults.done_notices),
        "joins": float(faults.joins),
        "moved_turns": gauges["moved_turns"],
        "turns_that_moved": float(sum(result.moves > 0 for result in got.values())),
        "late_tokens": gauges["late_tokens"],
        "different_turns": float(difference.different_turns),
        "lost_tokens": float(difference.lost_tokens),
        "duplicated_tokens": float(difference.duplicated_tokens),
        "different_logprobs": float(difference.different_logprobs),
        "replayed_events": float(agreed),
        "replay_divergences": float(divergence is not None),
        "undisturbed_s": calm_s,
        "disturbed_s": stormy_s,
    }


def _tokens(outputs: Outputs) -> int:
    return sum(len(result.tokens) for result in outputs.values())


async def _stormy(
    fleet: LiveFleet, workload: MultiTurn, faults: Faults, tokens: int, options: BenchOptions
) -> Outputs:
    storm = asyncio.create_task(_storm(fleet, faults, tokens, options))
    try:
        return await workload.run(fleet.floor.generate)
    finally:
        storm.cancel()
        await asyncio.gather(storm, return_exceptions=True)


async def _storm(fleet: LiveFleet, faults: Faults, tokens: int, options: BenchOptions) -> None:
    """At every moment take an engine that runs turns away, and start another."""
    rng = np.random.default_rng(faults.seed + 1)
    for share, kind in faults.moments:
        while True:
            busy = [record for record in fleet.ready() if record.attempts]
            if busy and fleet.floor.manager.gauges()["accepted_tokens"] >= share * tokens:
                break
            await asyncio.sleep(0.005)
        victim = busy[int(rng.integers(len(busy)))].spec.instance
        if kind == "kill":
            fleet.provider.kill(victim)
            faults.done_kills += 1
        else:
            fleet.provider.notice(victim, _NOTICE_S)
            faults.done_notices += 1
        faults.joins += len(fleet.provider.start(1))
        options.progress(f"{faults.done_kills} kills", share)
