"""Ten jobs with an adapter each on one base model, twenty versions each, on two real engines: what
do they pull?

Every job goes on by itself: it publishes an adapter into the weight store, has its turns sampled
from it, and publishes the next; the one before the last is retired. Each engine should pull each
version once, and no turn should wait for a version that another job's pushed out.
"""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from benchmarks.options import BenchOptions
from harness.live_fleet import BASE, FleetPlan, LiveFleet
from harness.rollout_floor import Before
from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import FleetCommand, FleetEvent
from slackwater.control.jobs.events import JobSubmitted
from slackwater.control.weights.commands import PullVersion
from slackwater.model.ids import JobId, TenantId, TrajectoryId, TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec

ENGINES = 2
RANK = 4
_DEADLINE_S = 1200.0


@dataclass(frozen=True, slots=True)
class JobsPlan:
    """How many jobs, versions of each, and turns of each version."""

    jobs: int = 10
    versions: int = 20
    turns: int = 8
    tokens: int = 8


class CountedPulls:
    """The controller, with the pulls it asks for counted by instance and version."""

    def __init__(self, controller: FleetController) -> None:
        self._controller = controller
        self.pulls: Counter[tuple[str, str]] = Counter()

    def handle(self, event: FleetEvent) -> Sequence[FleetCommand]:
        commands = self._controller.handle(event)
        for command in commands:
            if isinstance(command, PullVersion):
                self.pulls[command.instance, command.version] += 1
        return commands

    def check_integrity(self) -> None:
        self._controller.check_integrity()


def run(options: BenchOptions) -> dict[str, float]:
    """Figures of one run on real engine processes."""
    from slackwater.zoo.tiny import make_model

    plan = JobsPlan(jobs=4, versions=4) if options.quick else JobsPlan()
    with tempfile.TemporaryDirectory(prefix="slackwater-jobs-") as folder:
        model = Path(folder) / "model"
        make_model("tiny", model, seed=options.seed)
        return asyncio.run(many_jobs(FleetPlan(model, Path(folder)), plan, options))


async def many_jobs(
    fleet_plan: FleetPlan, plan: JobsPlan, options: BenchOptions
) -> dict[str, float]:
    """All jobs at once on two engines."""
    counted: list[CountedPulls] = []

    def before(controller: FleetController) -> Before:
        counted.append(CountedPulls(controller))
        return counted[0]

    async with asyncio.timeout(_DEADLINE_S), LiveFleet(fleet_plan, before=before) as fleet:
        fleet.provider.start(ENGINES)
        await fleet.until_ready(ENGINES)
        jobs = [_Job(fleet, fleet_plan, plan, number) for number in range(plan.jobs)]
        done = 0

        async def watched(job: "_Job") -> None:
            nonlocal done
            await job.run()
            done += 1
            options.progress("jobs", done / plan.jobs)

        await asyncio.gather(*(watched(job) for job in jobs))
        controller = fleet.floor.controller
        controller.check_integrity()
        gauges = controller.weights.gauges()
        accounts = [entry.account for entry in controller.jobs.entries()]
    pulls = {pair: count for pair, count in counted[0].pulls.items() if "@" in pair[1]}
    pairs = plan.jobs * plan.versions * ENGINES
    return {
        "pulls_per_version_and_engine": sum(pulls.values()) / pairs,
        "most_pulls_of_a_version_by_an_engine": float(max(pulls.values())),
        "turns_that_waited_for_an_evicted_version": gauges[
            "turns_that_waited_for_an_evicted_version"
        ],
        "versions": float(plan.jobs * plan.versions),
        "engines": float(ENGINES),
        "turns": float(sum(account.turns for account in accounts)),
        "failed_turns": float(sum(account.failed_turns for account in accounts)),
        "tokens": float(sum(account.tokens for account in accounts)),
        "engine_s": sum(account.engine_s for account in accounts),
        "turns_waited_s": sum(account.turns_waited_s for account in accounts),
    }


class _Job:
    """One job's run: publish, sample, publish."""

    def __init__(self, fleet: LiveFleet, paths: FleetPlan, plan: JobsPlan, number: int) -> None:
        self._fleet = fleet
        self._paths = paths
        self._plan = plan
        self._number = number
        self._job = JobId(f"bench/job-{number}")

    async def run(self) -> None:
        rollout = self._fleet.floor.rollout
        loop = asyncio.get_running_loop()
        rollout.feed(JobSubmitted(loop.time(), self._job, TenantId("bench")))
        for number in range(self._plan.versions):
            version = f"{self._number}@{number}"
            await asyncio.to_thread(self._publish, version)
            rollout.publish(version, BASE, self._job, line=self._job, adapter=True)
            turns = await self._fleet.generate(self._specs(version))
            assert all(turn.version == version for turn in turns)
            if number > 0:
                rollout.retire(f"{self._number}@{number - 1}")

    def _publish(self, version: str) -> None:
        """An adapter of its own: other numbers in every version."""
        import torch

        from slackwater.nets.config import NetConfig
        from slackwater.nets.lora import LoraAdapter, LoraSpec, lora_meta
        from slackwater.weights.directory import DirectoryWeightStore

        spec = LoraSpec(RANK, seed=crc32(version.encode()))
        adapter = LoraAdapter.create(spec, NetConfig.from_directory(self._paths.model))
        generator = torch.Generator().manual_seed(spec.seed)
        tensors = {
            name: tensor + 0.01 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in adapter.tensors.items()
        }
        store = DirectoryWeightStore(self._paths.work / "weights")
        store.publish(version, tensors, lora_meta(spec), durable=False)

    def _specs(self, version: str) -> list[TurnSpec]:
        specs = []
        for number in range(self._plan.turns):
            name = f"{version}/{number}"
            sampling = Sampling(self._plan.tokens, seed=number)
            of = (TurnId(name), TrajectoryId(name), self._job)
            specs.append(TurnSpec(*of, (1 + number, 2, 3), sampling, version, base_model=BASE))
        return specs
