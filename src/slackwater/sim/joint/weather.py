"""A storm over a joint fleet, from a seed: nodes are lost and cut off, jobs crash, agents lie and repeat themselves.

Jobs come all the time; when the storm is over every one that was taken in must finish, with all its iterations and nothing left behind. A seed
that fails is a bug report: `slackwater storm --joint --seed N` runs it again.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from slackwater.control.coschedule import events as of_phase
from slackwater.control.rollout import events as of_rollout
from slackwater.control.steps.book import STEP
from slackwater.control.steps.events import DevicesReturned
from slackwater.control.timer import TimerFired
from slackwater.control.weights.events import InstanceReady
from slackwater.model.ids import InstanceId, JobId, WorkerId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.job_life import JobStage
from slackwater.model.node import H20, H800, Pool, Role
from slackwater.model.placement import Phase
from slackwater.model.turn import AttemptId, FinishReason
from slackwater.sim.cluster.scenario import ClusterScenario, PolicyConfig
from slackwater.sim.cluster.simulate import new_controller
from slackwater.sim.joint.fleet import JointFleet
from slackwater.sim.joint.job_run import JobRun, TurnPlan

POLICIES = ("ours", "group", "colocated", "solo")
_CALM_S = 14 * 86_400.0


@dataclass(frozen=True, slots=True)
class JointReport:
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
    nodes_lost: int
    partitions: int
    crashes: int
    lies: int


class JointWeather:
    """Schedules trouble at random; the fleet's invariants are checked after every event."""

    def __init__(self, seed: int, hours: float) -> None:
        self.policy = POLICIES[seed % len(POLICIES)]
        self._end_s = hours * 3600
        specs = self._specs(seed)
        pools = (Pool(Role.ROLLOUT, H20, 6), Pool(Role.TRAIN, H800, 4))
        scenario = ClusterScenario(
            fleet=pools, jobs=specs, policy=PolicyConfig(name=self.policy), seed=seed
        )
        self.fleet = JointFleet(new_controller(scenario), specs, seed=seed, plan=TurnPlan())
        self._rng = self.fleet.rng
        self.nodes_lost = self.partitions = self.lies = 0

    def _specs(self, seed: int) -> tuple[JobSpec, ...]:
        rng = np.random.default_rng((seed, 7))
        specs: list[JobSpec] = []
        at_s = 0.0
        while True:
            at_s += float(rng.exponential(1500.0))
            if at_s >= self._end_s and specs:
                return tuple(specs)
            profile = JobProfile(
                rollout_s=float(rng.uniform(300, 1200)),
                train_s=float(rng.uniform(100, 500)),
                sync_s=float(rng.uniform(0, 20)),
                rollout_nodes=int(rng.integers(1, 4)),
                train_nodes=int(rng.integers(1, 3)),
            )
            job = JobId(f"j{len(specs)}")
            slo = float(rng.uniform(1.2, 3.0))
            specs.append(
                JobSpec(job, min(at_s, self._end_s), int(rng.integers(2, 6)), slo, profile)
            )

    def run(self) -> JointReport:
        """Rage, then see that everything ends."""
        fleet = self.fleet
        for trouble, mean_s in (
            (self._lose_node, 9000.0),
            (self._crash, 6000.0),
            (self._cut_off, 2500.0),
            (self._lie, 400.0),
        ):
            fleet.after(self._wait_s(mean_s), partial(self._again, trouble, mean_s))
        fleet.run(self._end_s)
        fleet.run(self._end_s + _CALM_S)
        assert not fleet.unsettled, f"jobs never ended: {fleet.stuck()}"
        self._all_over()
        counters = fleet.brain.rollout.books.counters
        entries = fleet.brain.jobs.entries()
        return JointReport(
            *(fleet.seed, self.policy, fleet.now_s / 3600, fleet.events, len(fleet.runs)),
            sum(entry.stage is JobStage.FINISHED for entry in entries),
            *(fleet.phases.iterations, fleet.turns.completed, counters.moved),
            *(fleet.phases.tail_migrations, fleet.turns.pulls),
            *(self.nodes_lost, self.partitions, fleet.phases.crashes, self.lies),
        )

    def _all_over(self) -> None:
        """Every job finished with all its iterations, and nothing is left of it."""
        fleet = self.fleet
        assert not fleet.permits, f"permits are still out: {fleet.permits}"
        assert not fleet.brain.steps.holders(), "a trainer still holds devices"
        assert not fleet.brain.rollout.books.turns, "turns are still live"
        for entry in fleet.brain.jobs.entries():
            run = fleet.runs[entry.job]
            if entry.stage is JobStage.REFUSED:
                continue
            assert entry.stage is JobStage.FINISHED, f"{entry.job} is {entry.stage}"
            assert run.iteration == run.spec.iterations, f"{entry.job} lost an iteration"
            assert entry.iterations_done == run.spec.iterations, f"{entry.job} is miscounted"
            wanted = run.spec.iterations * fleet.plan.turns
            done = entry.account.turns - entry.account.failed_turns
            assert done >= wanted, f"{entry.job}: {done} turns of {wanted}"
        left = [job for job in fleet.runs if fleet.brain.weights.versions_of(job)]
        assert not left, f"versions of {left} were never deleted"

    # ---- trouble ----
    def _wait_s(self, mean_s: float) -> float:
        return float(self._rng.exponential(mean_s))

    def _again(self, trouble: "object", mean_s: float) -> None:
        if self.fleet.now_s < self._end_s:
            assert callable(trouble)
            trouble()
            self.fleet.after(self._wait_s(mean_s), partial(self._again, trouble, mean_s))

    def _lose_node(self) -> None:
        rented = sorted(self.fleet.rented)
        if rented:
            self.nodes_lost += 1
            node = rented[int(self._rng.integers(len(rented)))]
            self.fleet.tell(of_phase.NodeLost(self.fleet.now_s, node))

    def _crash(self) -> None:
        alive = [run for run in self.fleet.runs.values() if run.epoch]
        if alive:
            victim = alive[int(self._rng.integers(len(alive)))]
            self.fleet.phases.crash(victim, "it crashed")

    def _cut_off(self) -> None:
        """Nothing is heard of a node, and nothing reaches it: short of the lease, or beyond."""
        rented = sorted(self.fleet.rented)
        if rented:
            self.partitions += 1
            node = rented[int(self._rng.integers(len(rented)))]
            self.fleet.silent_until_s[node] = self.fleet.now_s + self._wait_s(200.0)

    def _lie(self) -> None:
        """An agent says what is not so, or says it twice."""
        self.lies += 1
        now_s, fleet = self.fleet.now_s, self.fleet
        run = list(fleet.runs.values())[int(self._rng.integers(len(fleet.runs)))]
        match int(self._rng.integers(8)):
            case 0:
                fleet.tell(of_phase.PhaseFinished(now_s, run.job, 10**6, 1.0))
            case 1:
                fleet.tell(of_phase.TailReached(now_s, run.job, run.permit or 10**6))
            case 2:
                fleet.tell(of_phase.JobDied(now_s, run.job, run.epoch + 7))
            case 3:
                fleet.tell(DevicesReturned(now_s, WorkerId(f"{run.job}/nobody"), 1.0, True, 9))
            case 4:
                fleet.tell(TimerFired(now_s, STEP + run.job))
            case 5:
                fleet.tell(of_phase.PhaseRequested(now_s, run.job, run.epoch, *_other(run)))
            case _:
                self._engine_lies()

    def _engine_lies(self) -> None:
        fleet = self.fleet
        living = sorted(fleet.instances)
        if not living:
            return
        name = InstanceId(living[int(self._rng.integers(len(living)))])
        now_s = fleet.now_s
        if fleet.silent(fleet.node_of[name]):
            return
        match int(self._rng.integers(3)):
            case 0:
                fleet.tell(InstanceReady(now_s, name, "nobody@9"))
            case 1:
                stop = FinishReason.STOP
                fleet.tell(of_rollout.TurnEnded(now_s, name, AttemptId(10**9), stop, 1, "x"))
            case _:
                fleet.tell(of_rollout.TokensArrived(now_s, name, [1], [1, 2], [0.0]))


def _other(run: JobRun) -> tuple[Phase, int]:
    """A phase that is not the one it runs, of another iteration."""
    return (Phase.TRAIN if run.phase is Phase.ROLLOUT else Phase.ROLLOUT), run.iteration + 1


def joint_weather(seed: int, hours: float) -> JointReport:
    """Run one storm."""
    return JointWeather(seed, hours).run()
