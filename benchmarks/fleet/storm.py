"""A storm over a simulated fleet, from a seed, with the live limits.

Nodes are lost and cut off; engines and trainers die, stall and refuse; states and weights break
off on their way; drivers crash; agents and engines lie; serving nodes take back what they lent.
Jobs come all the time, some without a profile, of which some only train; when the storm is over
every job that was taken in must finish, with all its iterations and nothing left behind. A seed
that fails is a bug report: `slackwater storm --seed N` runs it again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.fleet.engine_faults import EngineFaults
from harness.checked_fleet import CheckedFleet
from harness.visitor import Visitor
from slackwater.control.coschedule import events as of_phase
from slackwater.control.operations.events import TicketDone
from slackwater.control.steps.events import DevicesReturned
from slackwater.control.steps.tracker import STEP
from slackwater.control.timer import TimerFired
from slackwater.model.ids import JobId, NodeId, WorkerId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.job_life import JobStage
from slackwater.model.node import H20, H800, Pool, Role
from slackwater.sim.cluster.scenario import ClusterScenario, PolicyConfig
from slackwater.sim.cluster.simulate import new_controller

POLICIES = ("interleaving", "group", "colocated", "solo")
_CALM_S = 14 * 86_400.0


@dataclass(frozen=True, slots=True)
class FleetStormReport:
    """What a storm came to; `hours` of virtual time went by until the last job had ended."""

    seed: int
    policy: str
    hours: float
    events: int
    jobs: int
    finished_jobs: int
    iterations: int
    completed_turns: int
    moved_turns: int
    tail_migrations: int
    pulls: int
    loans: int
    state_moves: int
    nodes_lost: int
    trainers_lost: int
    engine_faults: int
    failed_turns: int
    partitions: int
    crashes: int
    lies: int


class FleetStorm:
    """Schedules trouble at random, `rate` times as often as usual; the fleet's invariants are
    checked after every event.
    """

    def __init__(self, seed: int, hours: float, *, rate: float = 1.0) -> None:
        self.policy = POLICIES[seed % len(POLICIES)]
        self._end_s = hours * 3600
        self._rate = rate
        specs = self._specs(seed)
        # Of two of five seeds jobs have 4 to 16 devices, and the deployments of a node 4 each.
        least = 4 if seed % 5 in (1, 4) else 1
        pools = (
            Pool(Role.ROLLOUT, H20, 6, least_devices=least),
            Pool(Role.TRAIN, H800, 4, least_devices=least),
        )
        scenario = ClusterScenario(
            fleet=pools, jobs=specs, policy=PolicyConfig(name=self.policy), seed=seed
        )
        self.fleet = CheckedFleet(
            new_controller(scenario),
            specs,
            seed=seed,
            unprofiled=frozenset(spec.job for spec in specs[2::4]),
            supervised={spec.job: 3 for spec in specs[6::8]},
            serving_nodes=2,
        )
        self.fleet.broken_moves, self.fleet.broken_pulls = 0.2, 0.05
        self._engines = EngineFaults(self.fleet)
        self._visitor = Visitor(self.fleet)
        self._rng = self.fleet.rng
        self.nodes_lost = self.trainers_lost = self.engine_faults = 0
        self.partitions = self.lies = 0

    def _specs(self, seed: int) -> tuple[JobSpec, ...]:
        rng = np.random.default_rng((seed, 7))
        specs: list[JobSpec] = []
        at_s = 0.0
        while True:
            at_s += float(rng.exponential(1500.0))
            if at_s >= self._end_s and specs:
                return tuple(specs)
            profile = JobProfile(
                rollout_s=float(rng.uniform(100, 400)),
                train_s=float(rng.uniform(50, 200)),
                sync_s=float(rng.uniform(0, 20)),
                rollout_nodes=int(rng.integers(1, 4)),
                train_nodes=int(rng.integers(1, 3)),
                rollout_devices=(0, 3, 4, 8, 16)[len(specs) % 5] if seed % 5 in (1, 4) else 0,
                train_devices=(4, 0, 8, 16, 2)[len(specs) % 5] if seed % 5 in (1, 4) else 0,
            )
            slo = float(rng.uniform(1.2, 3.0))
            made = (JobId(f"j{len(specs)}"), min(at_s, self._end_s))
            specs.append(JobSpec(*made, int(rng.integers(3, 8)), slo, profile))

    def run(self, calm_s: float = _CALM_S) -> FleetStormReport:
        """Rage, then see that everything ends within `calm_s`."""
        fleet = self.fleet
        self._visitor.start()
        for trouble, mean_s in (
            (self._lose_node, 9000.0),
            (self._lose_trainer, 5000.0),
            (self._strike_engine, 800.0),
            (self._crash, 6000.0),
            (self._cut_off, 2500.0),
            (self._lie, 400.0),
        ):
            self._again(trouble, mean_s / self._rate)
        fleet.run(self._end_s + calm_s)
        assert not fleet.unsettled, f"jobs never ended: {fleet.describe_unfinished()}"
        self._check_end()
        counters = fleet.controller.rollout.state.counters
        entries = fleet.controller.jobs.entries()
        return FleetStormReport(
            *(fleet.seed, self.policy, fleet.now_s / 3600, fleet.events, len(fleet.jobs) - 1),
            sum(entry.stage is JobStage.FINISHED for entry in entries),
            *(fleet.clients.iterations, fleet.clients.completed, counters.moved),
            *(fleet.tail_migrations, fleet.engines.pulls, fleet.serving.loans),
            *(fleet.trainers.moves, self.nodes_lost, self.trainers_lost),
            *(self.engine_faults, fleet.clients.failed),
            *(self.partitions, fleet.clients.crashes, self.lies),
        )

    def _check_end(self) -> None:
        """Every job finished with all its iterations, and nothing is left of it."""
        fleet = self.fleet
        assert not fleet.permits, f"permits are still out: {fleet.permits}"
        for entry in fleet.controller.jobs.entries():
            job = fleet.jobs[entry.job]
            if job.samples_only or entry.stage is JobStage.REFUSED:
                continue
            assert entry.stage is JobStage.FINISHED, f"{entry.job} is {entry.stage}"
            assert job.iteration == job.spec.iterations, f"{entry.job} lost an iteration"
            wanted = 0 if job.supervised else job.spec.iterations * fleet.plan.turns
            done = entry.account.turns - entry.account.failed_turns
            assert done >= wanted, f"{entry.job}: {done} turns of {wanted}"
        left = [job for job in fleet.jobs if fleet.controller.weights.versions_of(job)]
        assert not left, f"versions of {left} were never deleted"

    # ---- trouble ----
    def _again(self, trouble: Callable[[], None], mean_s: float) -> None:
        self.fleet.after(self.fleet.wait_s(mean_s), partial(self._strike, trouble, mean_s))

    def _strike(self, trouble: Callable[[], None], mean_s: float) -> None:
        if self.fleet.now_s < self._end_s:
            trouble()
            self._again(trouble, mean_s)

    def _a_node(self) -> NodeId:
        nodes = self.fleet.scheduler.nodes
        return nodes[int(self._rng.integers(len(nodes)))]

    def _lose_node(self) -> None:
        self.nodes_lost += 1
        self.fleet.lose_node(self._a_node())

    def _lose_trainer(self) -> None:
        self.trainers_lost += 1
        trainers = sorted(self.fleet.trainers.living.values(), key=lambda one: one.worker)
        if trainers:
            victim = trainers[int(self._rng.integers(len(trainers)))]
            self.fleet.trainers.lose_node(victim.node, "killed")

    def _strike_engine(self) -> None:
        self.engine_faults += 1
        self._engines.strike()

    def _crash(self) -> None:
        alive = [job for job in self.fleet.jobs.values() if job.alive]
        if alive:
            self.fleet.clients.crash(alive[int(self._rng.integers(len(alive)))], "it crashed")

    def _cut_off(self) -> None:
        """Short of the lease, or beyond."""
        self.partitions += 1
        self.fleet.cut_off(self._a_node(), min(self.fleet.wait_s(100.0), 300.0))

    def _lie(self) -> None:
        """An agent says what is not so, or says it twice."""
        self.lies += 1
        now_s, fleet = self.fleet.now_s, self.fleet
        job = list(fleet.jobs)[int(self._rng.integers(len(fleet.jobs)))]
        match int(self._rng.integers(7)):
            case 0:
                fleet.tell(of_phase.PhaseFinished(now_s, job, 10**6, 1.0))
            case 1:
                fleet.tell(of_phase.TailReached(now_s, job, 10**6))
            case 2:
                fleet.tell(of_phase.JobCrashReported(now_s, job, 10**6))
            case 3:
                fleet.tell(DevicesReturned(now_s, WorkerId("nobody"), 1.0, True, 9))
            case 4:
                fleet.tell(TimerFired(now_s, STEP + job))
            case 5:
                worker = next(iter(sorted(fleet.trainers.living)), WorkerId("nobody"))
                fleet.tell(TicketDone(now_s, worker, 10**9, 1.0))
            case _:
                self._engines.lie()


def fleet_storm(seed: int, hours: float) -> FleetStormReport:
    """Run one storm."""
    return FleetStorm(seed, hours).run()
