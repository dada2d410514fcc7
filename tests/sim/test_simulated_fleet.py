"""The complete fleet controller over one simulated fleet, with the live limits."""

from dataclasses import replace

import pytest

from benchmarks.fleet.storm import fleet_storm
from harness.checked_fleet import CheckedFleet
from harness.simulated_devices import DEVICES
from harness.visitor import Visitor
from slackwater.control.coschedule.job_state import JobStatus
from slackwater.control.coschedule.phase_watch import PhaseLimits
from slackwater.control.coschedule.settings import CoscheduleSettings
from slackwater.control.devices.allocator import DeviceAllocator
from slackwater.control.devices.messages import DeploymentsRequested
from slackwater.model.device import DeploymentRequest
from slackwater.model.ids import DeploymentId, JobId, NodeId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.job_life import JobStage
from slackwater.model.node import H20, H800, Pool, Role
from slackwater.model.placement import Phase
from slackwater.sim.cluster.scenario import ClusterScenario, PolicyConfig
from slackwater.sim.cluster.simulate import new_controller
from slackwater.sim.fleet.costs import FleetCosts, MachineShare
from slackwater.sim.fleet.job import TurnPlan
from slackwater.sim.fleet.simulate import simulate_jointly
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


def test_the_limits_are_those_of_a_service() -> None:
    case = scenario("ours")
    fleet = CheckedFleet(new_controller(case), case.jobs)
    assert fleet.controller.phases is not None
    assert fleet.controller.phases.limits == PhaseLimits()


def test_a_job_without_a_profile_is_profiled_and_then_placed() -> None:
    case = scenario("ours")
    stranger = JobId("j1")
    specs = [replace(spec, iterations=5) for spec in case.jobs]
    fleet = CheckedFleet(new_controller(case), specs, unprofiled=frozenset({stranger}))
    stages: set[JobStage] = set()

    def watched() -> bool:
        entry = fleet.controller.jobs.find(stranger)
        stages.update(() if entry is None else (entry.stage,))
        return False

    fleet.run(stop=watched)
    assert {JobStage.PROFILING, JobStage.RUNNING} <= stages
    entry = fleet.controller.jobs.find(stranger)
    assert entry is not None and entry.stage is JobStage.FINISHED
    assert entry.profile is not None and entry.profile.train_s == pytest.approx(100.0, rel=0.5)


def test_loans_are_asked_for_by_turns_and_given_back_when_none_is_left() -> None:
    case = scenario("ours", jobs=1)
    fleet = CheckedFleet(new_controller(case), case.jobs, serving_nodes=2)
    visitor = Visitor(fleet)
    visitor.start()
    lent: set[int] = set()

    def watched() -> bool:
        lent.add(len(fleet.serving.lent))
        return False

    fleet.run(stop=watched)
    assert fleet.serving.loans > 0 and {0, 1} <= lent


@pytest.mark.parametrize(("policy", "slo"), [("ours", 2.0), ("ours", 1.5), ("group", 2.0)])
def test_a_profile_that_lies_by_three_costs_its_own_job_its_place_and_the_others_keep_their_bound(
    policy: str, slo: float
) -> None:
    said = JobProfile(10.0, 10.0, 1.0, rollout_state_gb=0.0, train_state_gb=0.0, model_billions=0.1)
    truth = replace(said, rollout_s=30.0, train_s=30.0)
    honest, liar = JobId("honest"), JobId("liar")
    specs = [JobSpec(honest, 0.0, 40, slo, said), JobSpec(liar, 50.0, 40, slo, said)]
    scheduler = CoscheduleSettings(placement=policy, tails=False).new_coscheduler(1, 1)
    fleet = CheckedFleet(
        scheduler,
        specs,
        plan=TurnPlan(4, 24, 1.0, 0.0),  # every response is as long as it may be
        costs=FleetCosts(0.1, 0.0, 0.01),
        lengths={liar: truth},
    )
    reasons: set[str] = set()

    def watched() -> bool:
        entry = fleet.controller.jobs.find(liar)
        reasons.add("" if entry is None or entry.stage is not JobStage.HELD else entry.reason)
        return False

    fleet.run(stop=watched)
    assert any("its phases take 3." in why and "honest could not keep" in why for why in reasons)
    for job in (honest, liar):
        state = scheduler.job(job)
        assert state.status is JobStatus.FINISHED and state.iterations_done == 40
        assert state.clock_time_s(fleet.now_s) <= slo * state.observed_s, f"{job} is past its bound"


@pytest.mark.parametrize("policy", ["ours", "group"])
def test_a_member_keeps_its_bound_beside_jobs_of_unknown_and_of_untrue_lengths(policy: str) -> None:
    """A supervised job of a hundred seconds, a sampler of endless rollouts, and a job that declares
    a fifth of its lengths; the slowdown that is reported is that of a clock beside the job.
    """
    said = JobProfile(10.0, 10.0, 1.0, rollout_state_gb=0.0, train_state_gb=0.0, model_billions=0.1)
    names = tuple(JobId(name) for name in ("member", "supervised", "sampler", "liar"))
    member, supervised, sampler, liar = names
    iterations = dict(zip(names, (60, 4, 3, 20), strict=True))
    arrivals_s = {member: 0.0, liar: 200.0}
    specs = [
        JobSpec(name, arrivals_s.get(name, 30.0), iterations[name], 1.5, said) for name in names
    ]
    scheduler = CoscheduleSettings(placement=policy, tails=False).new_coscheduler(1, 1)
    fleet = CheckedFleet(
        scheduler,
        specs,
        plan=TurnPlan(4, 24, 1.0, 0.0),  # every response is as long as it may be
        costs=FleetCosts(0.1, 0.0, 0.01),
        lengths={
            liar: replace(said, rollout_s=50.0, train_s=50.0),
            sampler: replace(said, rollout_s=300.0, train_s=1.0),
        },
        unprofiled=frozenset({supervised, sampler}),
        supervised={supervised: 10},
    )
    keeper = fleet.controller.phases
    assert keeper is not None
    began_s: list[float] = []
    ended: dict[str, float] = {}

    def watched() -> bool:
        state = scheduler.find(member)
        if state is not None and state.clock_since_s is not None and not began_s:
            began_s.append(fleet.now_s)
        if state is not None and state.status is JobStatus.PLACED and state.iterations_done > 2:
            job = fleet.jobs[member]
            reported = keeper.slowdown(member, fleet.now_s)
            assert reported is not None
            holds = keeper.find(member)
            running_s = 0.0
            if holds is not None and holds.permit is not None:
                running_s = fleet.now_s - holds.permit.started_s
            clock_s = fleet.now_s - began_s[0]
            assert reported == pytest.approx(clock_s / (state.observed_s + running_s), rel=0.05)
            ended["slowdown"] = clock_s / (max(job.iteration, 1) * said.solo_s)
        return member in fleet.jobs and fleet.jobs[member].over

    fleet.run(stop=watched)
    assert ended["slowdown"] <= 1.5 * 60 / 59  # an iteration is not counted until it is published
    fleet.run()
    assert all(scheduler.job(name).status is JobStatus.FINISHED for name in (member, liar))
    assert all(job.over for job in fleet.jobs.values())


def test_jobs_on_cores_of_one_machine_slow_down_by_what_control_plane_and_drivers_use() -> None:
    case = scenario("group", rollout_nodes=1)
    quiet = simulate_jointly(case, costs=FleetCosts(share=MachineShare(2)))
    busy = simulate_jointly(case, costs=FleetCosts(share=MachineShare(2, 0.2, 0.2)))
    assert quiet.end_s < busy.end_s < 1.3 * quiet.end_s
    assert 0 < quiet.train_utilisation < 1


def test_a_run_is_drawn_from_its_permits() -> None:
    drawn: list[Timeline] = []
    report = simulate_jointly(scenario("ours"), draw=drawn.append)
    trains = [span for span in drawn[0].spans if span.phase is Phase.TRAIN]
    assert len(trains) >= report.iterations
    assert all(span.end_s <= report.end_s for span in drawn[0].spans)


def test_a_state_that_is_lost_with_its_trainer_comes_back_with_every_operation() -> None:
    case = scenario("ours", jobs=1)
    fleet = CheckedFleet(new_controller(case), case.jobs)

    def trained() -> bool:
        return fleet.clients.iterations == 1

    fleet.run(stop=trained)
    for node in ("train-0", "train-1"):
        fleet.lose_node(NodeId(node))
    fleet.run()
    assert fleet.clients.iterations == 3


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_in_a_storm_of_all_faults_under_the_live_limits(seed: int) -> None:
    report = fleet_storm(seed, 0.6)
    assert report.finished_jobs == report.jobs
    assert report.loans > 0


def test_the_same_seed_is_the_same_storm() -> None:
    assert fleet_storm(4, 0.3) == fleet_storm(4, 0.3)


def test_a_storm_objects_to_a_device_with_two_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    case = scenario("ours")
    fleet = CheckedFleet(new_controller(case), case.jobs)
    fleet.check_integrity()
    assert len(fleet.devices.held) == 6  # two rollout nodes, and two that train too
    monkeypatch.setattr(DeviceAllocator, "_may_share", lambda *_: True)
    asked = DeploymentRequest(
        DeploymentId("intruder"), DEVICES, node=NodeId("train-0"), kind="cuda", group="intruder"
    )
    with pytest.raises(AssertionError, match="is owned by"):
        fleet.tell(DeploymentsRequested(0.0, (asked,)))
