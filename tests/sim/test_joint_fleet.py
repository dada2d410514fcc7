"""Co-scheduler, rollout manager, weight director, step book and job book over one simulated fleet."""

from dataclasses import replace

import pytest

from slackwater.control.coschedule.job_state import JobStatus
from slackwater.control.coschedule.settings import CoscheduleSettings
from slackwater.control.rollout.gates import Gates
from slackwater.control.weights.director import WeightDirector
from slackwater.model.ids import JobId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.job_life import JobStage
from slackwater.model.node import H20, H800, Pool, Role
from slackwater.model.placement import Phase
from slackwater.sim.cluster.scenario import ClusterScenario, PolicyConfig
from slackwater.sim.cluster.simulate import new_controller
from slackwater.sim.joint.brain_body import BrainBody
from slackwater.sim.joint.costs import JointCosts, MachineShare
from slackwater.sim.joint.fleet import JointFleet
from slackwater.sim.joint.job_run import TurnPlan
from slackwater.sim.joint.phase_body import PhaseBody
from slackwater.sim.joint.simulate import simulate_jointly
from slackwater.sim.joint.weather import joint_weather
from slackwater.timeline.spans import Timeline


def scenario(policy: str, jobs: int = 3, rollout_nodes: int = 2) -> ClusterScenario:
    specs = tuple(
        JobSpec(
            JobId(f"j{number}"),
            100.0 * number,
            3,
            2.0,
            JobProfile(300.0, 100.0, 5.0, rollout_nodes=rollout_nodes),
        )
        for number in range(jobs)
    )
    pools = (Pool(Role.ROLLOUT, H20, 2), Pool(Role.TRAIN, H800, 2))
    return ClusterScenario(fleet=pools, jobs=specs, policy=PolicyConfig(name=policy))


@pytest.mark.parametrize("policy", ["ours", "group", "colocated"])
def test_jobs_that_share_nodes_make_all_their_iterations(policy: str) -> None:
    report = simulate_jointly(scenario(policy))
    assert (report.finished_jobs, report.iterations, report.turns) == (3, 9, 9 * 12)
    assert report.trainer_s == pytest.approx(9 * 100.0, rel=0.6)


def test_the_last_turns_move_to_one_engine_and_the_next_job_takes_the_freed_nodes() -> None:
    report = simulate_jointly(scenario("group"))
    assert report.tail_migrations > 0
    assert report.moved_turns > 0


@pytest.mark.parametrize(("policy", "slo"), [("ours", 2.0), ("ours", 1.5), ("group", 2.0)])
def test_a_profile_that_lies_by_three_costs_its_own_job_its_place_and_the_others_keep_their_bound(
    policy: str, slo: float
) -> None:
    said = JobProfile(10.0, 10.0, 1.0, rollout_state_gb=0.0, train_state_gb=0.0, model_billions=0.1)
    truth = replace(said, rollout_s=30.0, train_s=30.0)
    honest, liar = JobId("honest"), JobId("liar")
    specs = [JobSpec(honest, 0.0, 40, slo, said), JobSpec(liar, 50.0, 40, slo, said)]
    scheduler = CoscheduleSettings(placement=policy, tails=False).new_coscheduler(1, 1)
    fleet = JointFleet(
        scheduler,
        specs,
        plan=TurnPlan(4, 24, 1.0, 0.0),  # every response is as long as it may be
        costs=JointCosts(0.1, 0.0, 0.01),
        lengths={liar: truth},
    )
    reasons: set[str] = set()

    def watched() -> bool:
        entry = fleet.brain.jobs.find(liar)
        reasons.add("" if entry is None or entry.stage is not JobStage.HELD else entry.reason)
        return False

    fleet.run(stop=watched)
    assert any("its phases take 3." in why and "honest could not keep" in why for why in reasons)
    for job in (honest, liar):
        state = scheduler.job(job)
        assert state.status is JobStatus.FINISHED and state.iterations_done == 40
        assert state.elapsed_s(fleet.now_s) <= slo * state.seen_s, f"{job} is past its bound"


def test_jobs_on_cores_of_one_machine_slow_down_by_what_control_plane_and_drivers_use() -> None:
    case = scenario("group", rollout_nodes=1)
    quiet = simulate_jointly(case, costs=JointCosts(share=MachineShare(2)))
    busy = simulate_jointly(case, costs=JointCosts(share=MachineShare(2, 0.2, 0.2)))
    assert quiet.end_s < busy.end_s < 1.3 * quiet.end_s
    assert 0 < quiet.train_utilisation < 1


def test_a_joint_run_is_drawn_from_its_permits() -> None:
    drawn: list[Timeline] = []
    report = simulate_jointly(scenario("ours"), draw=drawn.append)
    trains = [span for span in drawn[0].spans if span.phase is Phase.TRAIN]
    assert len(trains) >= report.iterations
    assert all(span.end_s <= report.end_s for span in drawn[0].spans)


def test_local_engines_roll_out_between_the_trainings_of_a_colocated_job() -> None:
    case = scenario("colocated", jobs=1)
    fleet = JointFleet(new_controller(case), case.jobs)
    kinds: set[str] = set()

    def watched() -> bool:
        kinds.update(record.spec.kind for record in fleet.brain.rollout.books.instances)
        return False

    fleet.run(stop=watched)
    assert kinds == {"local"}


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_in_a_storm_of_lost_nodes_partitions_crashes_and_lies(seed: int) -> None:
    report = joint_weather(seed, 1.0)
    assert report.finished_jobs == report.jobs
    assert report.lies > 0


def test_turns_that_are_cancelled_since_their_job_died_are_no_tail() -> None:
    report = joint_weather(1, 6.0)  # seed 1: a job dies while it rolls out, after 5.5 hours
    assert report.crashes > 0
    assert report.finished_jobs == report.jobs


def test_the_same_seed_is_the_same_storm() -> None:
    assert joint_weather(1, 0.5) == joint_weather(1, 0.5)


def test_engines_that_go_on_when_their_jobs_permit_is_gone_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = scenario("group")
    fleet = JointFleet(new_controller(case), case.jobs)
    manager = fleet.brain.rollout

    def busy() -> bool:
        return any(record.attempts for record in manager.books.instances)

    fleet.run(stop=busy)
    monkeypatch.setattr(PhaseBody, "_engines_end", lambda self, run, reason: [])
    monkeypatch.setattr(BrainBody, "give_up", lambda self, turn: None)
    victim = next(run for run in fleet.runs.values() if run.open_turns)
    victim.open_turns.clear()  # so that nothing is cancelled either
    monkeypatch.setattr(Gates, "set", lambda self, job, gate: None)  # nor gated
    with pytest.raises(AssertionError, match="without a permit"):
        fleet.phases.crash(victim, "killed")


def test_a_director_that_drops_what_is_in_use_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = WeightDirector._left

    def forgets(self: WeightDirector, *args: object) -> None:
        self._books.needed.clear()
        honest(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(WeightDirector, "_left", forgets)
    with pytest.raises(AssertionError, match="need out of step"):
        joint_weather(0, 2.0)
