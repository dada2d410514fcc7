"""Bursts against a small service with rollouts beside, on real processes: every token of both
compared.

First the service alone, and the rollouts alone on an engine of their own. Then both together, the
service's worker lending, while its requests come in bursts and workers of both kinds are killed:
answers and rollouts must be the same to the bit.
"""

import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.options import BenchOptions
from harness.live_fleet import JOB
from harness.multi_turn import MultiTurn, Outputs, compare
from harness.serving_floor import CHAT, CHAT_VERSION, ServingFloor, ServingPlan
from slackwater.control.rollout.commands import CompleteTurn
from slackwater.model.ids import JobId, TrajectoryId, TurnId, WorkerId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec
from slackwater.wire.lending import is_loan

_DEADLINE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Bursts:
    """`count` bursts of 1 to `most` requests each."""

    seed: int
    count: int
    most: int = 12

    def drawn(self) -> list[list[TurnSpec]]:
        """The same requests for the same seed."""
        rng = np.random.default_rng((self.seed, 77))
        bursts: list[list[TurnSpec]] = []
        for burst in range(self.count):
            requests = []
            for number in range(1 + int(rng.integers(self.most))):
                name = f"chat/{burst}/{number}"
                prompt = tuple(rng.integers(10, 250, int(rng.integers(4, 120))).tolist())
                sampling = Sampling(
                    max_tokens=int(rng.integers(2, 60)), seed=int(rng.integers(2**31))
                )
                requests.append(
                    TurnSpec(
                        turn=TurnId(name),
                        trajectory=TrajectoryId(name),
                        job=JobId(CHAT),
                        prompt=prompt,
                        sampling=sampling,
                        version=CHAT_VERSION,
                        base_model=CHAT,
                    )
                )
            bursts.append(requests)
        return bursts

    async def run(self, floor: ServingFloor, between: "Between | None" = None) -> Outputs:
        """Burst after burst; the next comes when most of the last are answered."""
        outputs: Outputs = {}
        waiting: set[asyncio.Task[CompleteTurn]] = set()
        tasks: dict[TurnId, asyncio.Task[CompleteTurn]] = {}
        for number, requests in enumerate(self.drawn()):
            for spec in requests:
                task = asyncio.create_task(floor.floor.generate(spec))
                tasks[spec.turn] = task
                waiting.add(task)
            while len(waiting) > len(requests) // 4:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if between is not None:
                await between(number)
        for name, task in tasks.items():
            outputs[name] = await task
        return outputs


class Between:
    """What happens between two bursts of the disturbed run: now and then a worker is killed, and
    started again.
    """

    def __init__(
        self,
        floor: ServingFloor,
        chat: WorkerId,
        policy: WorkerId,
        every: int,
        bursts: int,
        options: BenchOptions,
    ) -> None:
        self._bursts = bursts
        self._floor, self._chat, self._policy = floor, chat, policy
        self._every, self._options = every, options
        self.kills = 0
        self.chat_workers = [chat]
        self.lent_tokens: dict[WorkerId, float] = {}
        self.cuts: dict[WorkerId, float] = {}

    async def __call__(self, burst: int) -> None:
        floor = self._floor
        floor.floor.manager.check_integrity()
        floor.floor.controller.check_integrity()
        floor.step(JOB)  # what rolls out next is of the job's next RL step
        self.note()
        done = 0.5 + 0.5 * burst / self._bursts
        self._options.progress(f"{burst} bursts, {self.kills} kills", done)
        if self._every and burst % self._every == self._every - 1:
            self.kills += 1
            if self.kills % 2:
                floor.kill(self._policy)
                self._policy = await floor.start(floor.plan.policy_worker())
            else:
                floor.kill(self._chat)
                self._chat = await floor.start(floor.plan.chat_worker())
                self.chat_workers.append(self._chat)

    def note(self) -> None:
        """Remember what loans have made and how often budgets were cut, before their workers go."""
        floor = self._floor
        for worker, gauges in floor.floor.rollout.gauges.items():
            if is_loan(worker):
                self.lent_tokens[worker] = gauges.get("produced_tokens", 0.0)
            elif "budget_cuts" in gauges:
                self.cuts[worker] = gauges["budget_cuts"]

    @property
    def chat(self) -> WorkerId:
        return self._chat


async def alone_and_together(
    plan: ServingPlan, bursts: Bursts, games: MultiTurn, kill_every: int, options: BenchOptions
) -> dict[str, float]:
    """Both undisturbed, then together; figures of how they differ."""
    began_s = time.perf_counter()
    async with asyncio.timeout(_DEADLINE_S):
        async with ServingFloor(plan) as floor:
            chat, policy = [
                await floor.start(one) for one in (plan.chat_worker(), plan.policy_worker())
            ]
            await floor.until_joined(chat)
            await floor.until_joined(policy)
            options.progress("the service alone", 0.1)
            answers = await bursts.run(floor)
            floor.kill(chat)
            options.progress("the rollouts alone", 0.3)
            rollouts = await games.run(floor.floor.generate)
        apart_s = time.perf_counter() - began_s
        async with ServingFloor(plan) as floor:
            chat, policy = [
                await floor.start(one) for one in (plan.chat_worker(), plan.policy_worker())
            ]
            await floor.until_joined(chat)
            await floor.until_joined(policy)
            between = Between(floor, chat, policy, kill_every, bursts.count, options)
            rolling = asyncio.create_task(games.run(floor.floor.generate))
            await floor.until(lambda: bool(floor.borrowed()) or rolling.done())
            got_answers = await bursts.run(floor, between)
            got_rollouts = await rolling
            between.note()
            leaked = await _leaks(floor, between.chat)
            gauges = floor.floor.manager.gauges()
    served, rolled = compare(answers, got_answers), compare(rollouts, got_rollouts)
    return {
        "bursts": float(bursts.count),
        "answers": float(len(answers)),
        "turns": float(len(rollouts)),
        "kills": float(between.kills),
        "lent_tokens": sum(between.lent_tokens.values()),
        "budget_cuts": sum(between.cuts.values()),
        "moved_turns": gauges["moved_turns"],
        "different_answers": float(served.different_turns),
        "different_answer_logprobs": float(served.different_logprobs),
        "different_rollouts": float(rolled.different_turns),
        "different_rollout_logprobs": float(rolled.different_logprobs),
        "lost_tokens": float(rolled.lost_tokens + served.lost_tokens),
        "leaked": leaked,
        "apart_s": apart_s,
        "together_s": time.perf_counter() - began_s - apart_s,
    }


async def _leaks(floor: ServingFloor, chat: WorkerId) -> float:
    """Requests, loans and blocks that are left when everything is over; 0 is wanted, and waited for
    a while.
    """
    await floor.until_joined(chat)
    left = float("inf")
    for _ in range(600):
        gauges = floor.gauges_of(chat)
        if "running" in gauges:
            held = (
                gauges["running"] + gauges["waiting"] + gauges["kv_blocks_in_use"] + gauges["lent"]
            )
            left = held + len(floor.borrowed()) + len(floor.floor.manager.state.turns)
            if left == 0:
                break
        await asyncio.sleep(0.05)
    return left


def run(options: BenchOptions) -> dict[str, float]:
    """200 bursts by seed, a kill after every tenth."""
    from slackwater.zoo.tiny import make_model

    count = 20 if options.quick else 200
    with tempfile.TemporaryDirectory(prefix="slackwater-bursts-") as folder:
        chat, policy = Path(folder) / "chat", Path(folder) / "policy"
        make_model("tiny", chat, seed=options.seed)
        make_model("small", policy, seed=options.seed + 1)
        plan = ServingPlan(chat, policy, Path(folder))
        games = MultiTurn(options.seed, trajectories=12 if options.quick else 64, turns=4)
        bursts = Bursts(options.seed, count)
        return asyncio.run(alone_and_together(plan, bursts, games, 10, options))
