"""Phases are inferred from turns and operations, and permits open and close their gates."""

from dataclasses import replace

import pytest
from phase_stage import PROFILE, TENANT, PhaseStage

from slackwater.control.coschedule.commands import PermitEnded, StartJob
from slackwater.control.coschedule.events import JobCrashReported, JobFinished
from slackwater.control.coschedule.phase_controller import WATCH
from slackwater.control.coschedule.phase_cycle import REST
from slackwater.control.coschedule.phase_events import (
    PermitAsked,
    PermitReturned,
    PermitsNumbered,
)
from slackwater.control.coschedule.phase_watch import PhaseLimits
from slackwater.control.jobs.events import IdleJobsSought, JobEnded, JobHeard, JobSubmitted
from slackwater.control.operations.facts import PublishDetached
from slackwater.control.rollout import commands as do
from slackwater.control.rollout import events as of_rollout
from slackwater.model.ids import JobId, NodeId, RequestId
from slackwater.model.job import JobProfile, JobTerms
from slackwater.model.job_life import JobStage
from slackwater.model.operation import OpKind
from slackwater.model.placement import Phase

TRAIN_NODE = (NodeId("train-0"),)


def test_the_first_turn_opens_the_rollout_and_a_pass_the_training() -> None:
    stage = PhaseStage()
    job = stage.submit("a")
    first, second = stage.turn(job), stage.turn(job)
    assert stage.permits() == [("a", "rollout")]
    assert set(stage.running) == {first, second}
    stage.end_turn(first)
    stage.end_turn(second)
    assert stage.permits() == []  # more turns may come
    stage.op(job, OpKind.FORWARD_BACKWARD)
    assert stage.permits() == [("a", "train")]
    assert stage.gates[job] == TRAIN_NODE


def test_the_second_job_rolls_out_while_the_first_trains() -> None:
    stage = PhaseStage()
    a, b = stage.submit("a"), stage.submit("b")
    mine = stage.turn(a)
    other = stage.turn(b)
    assert other not in stage.running and mine in stage.running
    stage.end_turn(mine, 10.0)
    step = stage.op(a, OpKind.FORWARD_BACKWARD)
    assert set(stage.permits()) == {("a", "rollout"), ("a", "train"), ("b", "rollout")}
    assert other in stage.running
    assert stage.gates == {a: TRAIN_NODE, b: ()}
    stage.end_turn(other, 5.0)
    waits = stage.op(b, OpKind.FORWARD_BACKWARD)
    assert stage.gates[b] == () and stage.permits() == []
    stage.end_op(a, step, OpKind.FORWARD_BACKWARD)
    assert stage.permits() == []  # its step is still to come
    for kind in (OpKind.OPTIM_STEP, OpKind.PUBLISH):
        stage.end_op(a, stage.op(a, kind), kind)
    assert stage.permits() == [("b", "train")] and waits
    assert stage.gates == {a: (), b: TRAIN_NODE}


def test_another_trains_as_soon_as_the_step_s_weights_are_copied_and_written_beside() -> None:
    stage = PhaseStage()
    a, b = stage.submit("a"), stage.submit("b")
    for job in (a, b):
        stage.end_turn(stage.turn(job), 1.0)
        stage.op(job, OpKind.FORWARD_BACKWARD)
    assert stage.gates == {a: TRAIN_NODE, b: ()}
    stage.permits()
    stage.end_op(a, RequestId("a.op1"), OpKind.FORWARD_BACKWARD)
    step = stage.op(a, OpKind.OPTIM_STEP)
    publish = stage.op(a, OpKind.PUBLISH)
    stage.tell(PublishDetached(stage.now_s, a, RequestId("of the step before")))
    stage.end_op(a, step, OpKind.OPTIM_STEP)
    assert stage.permits() == []  # its own weights are still to be copied
    stage.tell(PublishDetached(stage.now_s, a, publish))
    assert stage.permits() == [("b", "train")]
    assert stage.gates == {a: (), b: TRAIN_NODE}
    stage.end_op(a, publish, OpKind.PUBLISH, 5.0)
    assert stage.permits() == [] and stage.gates[b] == TRAIN_NODE


@pytest.mark.parametrize("profile", [PROFILE, None])
def test_what_was_there_before_its_job_was_placed_asks_for_its_phase(
    profile: JobProfile | None,
) -> None:
    """As after a restart: turns and operations come from the store, then drivers are found and
    their jobs placed.
    """
    stage = PhaseStage(engines=0)
    a, b = JobId("a"), JobId("b")
    stage.turn(a)
    over = stage.op(b, OpKind.FORWARD_BACKWARD)
    stage.op(b, OpKind.OPTIM_STEP)
    stage.end_op(b, over, OpKind.FORWARD_BACKWARD)
    stage.submit("a", profile)
    assert stage.permits() == [("a", "rollout")]
    stage.submit("b", profile)
    stage.tell(JobEnded(1.0, a, "stopped", ""))
    assert stage.permits() == [("b", "train")]


def test_turns_that_come_while_a_pass_waits_belong_to_the_next_rollout() -> None:
    stage = PhaseStage()
    job = stage.submit("a")
    early = stage.turn(job)
    stage.op(job, OpKind.FORWARD_BACKWARD)
    late = stage.turn(job)
    assert set(stage.running) == {early} and late
    stage.end_turn(early)
    assert stage.permits() == [("a", "rollout"), ("a", "train")]


def test_a_job_that_only_trains_skips_its_rollouts() -> None:
    stage = PhaseStage()
    job = stage.submit("a")
    for _ in range(3):
        stage.train(job)
    assert stage.permits() == [("a", "train")] * 3
    entry = stage.controller.jobs.find(job)
    assert entry is not None and entry.iterations_done == 3


def test_a_job_without_terms_has_no_gate() -> None:
    stage = PhaseStage()
    stage.submit("a")
    stage.turn(JobId("a"))
    plain = stage.turn(JobId("session"))
    assert plain in stage.running
    stage.op(JobId("session"), OpKind.FORWARD_BACKWARD)
    assert JobId("session") not in stage.gates


def test_an_unknown_job_is_profiled_in_two_cycles_and_then_placed() -> None:
    stage = PhaseStage()
    job = stage.submit("a", profile=None)
    assert stage.stage_of(job) is JobStage.PROFILING
    for cycle_s in (9.0, 6.0):
        stage.end_turn(stage.turn(job), cycle_s)
        stage.train(job, 3.0)
    entry = stage.controller.jobs.find(job)
    assert entry is not None and entry.profile is not None
    assert (entry.profile.rollout_s, round(entry.profile.train_s, 6)) == (6.0, 3.0)
    assert stage.stage_of(job) is JobStage.PLACED
    (start,) = stage.of(StartJob)
    assert start.iterations_done == 2


def test_a_guest_takes_only_what_nobody_waits_for() -> None:
    stage = PhaseStage()
    a, b, guest = stage.submit("a"), stage.submit("b"), stage.submit("g", profile=None)
    mine = stage.turn(a)
    stage.turn(b)
    unknown = stage.turn(guest)
    stage.end_turn(mine, 10.0)
    stage.op(a, OpKind.FORWARD_BACKWARD)
    assert set(stage.permits()) == {("a", "rollout"), ("a", "train"), ("b", "rollout")}
    assert unknown not in stage.running


def test_a_guest_that_trains_on_and_on_lets_a_member_in_after_its_first_step() -> None:
    stage = PhaseStage()
    member, guest = stage.submit("a"), stage.submit("g", profile=None)
    first, second = (stage.op(guest, OpKind.OPTIM_STEP) for _ in range(2))
    assert ("g", "train") in stage.permits()
    turn = stage.turn(member)
    stage.end_turn(turn, 10.0)
    trains = stage.op(member, OpKind.OPTIM_STEP)
    assert stage.permits() == [("a", "rollout")]
    stage.now_s += 1.0
    stage.end_op(guest, first, OpKind.OPTIM_STEP)
    assert stage.permits() == [("a", "train")]
    one = stage.keeper.find(guest)
    assert one is not None and one.iteration == 0 and one.preempted_s == 11.0
    stage.turn(member)
    stage.now_s += 10.0
    stage.end_op(member, trains, OpKind.OPTIM_STEP)
    assert ("g", "train") in stage.permits()  # and it goes on where it was
    stage.end_op(guest, second, OpKind.OPTIM_STEP)
    assert one.permit is not None  # nobody waits for it now


def test_the_rollout_of_a_guest_is_cut_at_once_where_a_member_waits_and_counts_as_one() -> None:
    stage = PhaseStage()
    member, guest = stage.submit("a"), stage.submit("g", profile=None)
    unknown = stage.turn(guest)
    assert unknown in stage.running
    stage.now_s += 4.0
    mine = stage.turn(member)
    assert mine in stage.running and unknown not in stage.running
    stage.end_turn(mine, 10.0)
    stage.op(member, OpKind.OPTIM_STEP)
    assert unknown in stage.running
    stage.end_turn(unknown, 3.0)
    one = stage.keeper.find(guest)
    assert one is not None
    stage.op(guest, OpKind.OPTIM_STEP)
    assert one.observed_s == {Phase.ROLLOUT: [7.0]}


@pytest.mark.parametrize(("step_s", "let_in"), [(30.0, True), (2000.0, False)])
def test_a_guest_trains_only_where_members_can_bear_to_wait_for_its_step(
    step_s: float, let_in: bool
) -> None:
    """The member, of twenty seconds and a hundred iterations, may wait for 1,000 s."""
    stage = PhaseStage()
    member, guest = stage.submit("a", terms=JobTerms(100, 1.5)), stage.submit("g", profile=None)
    stage.end_turn(stage.turn(guest), 1.0)
    stage.train(guest, step_s)  # nobody can know
    stage.end_turn(stage.turn(guest), 1.0)
    turn = stage.turn(member)
    stage.op(guest, OpKind.OPTIM_STEP)
    assert (stage.permits()[-1] == ("g", "train")) == let_in
    stage.end_turn(turn, 10.0)
    stage.train(member, 10.0)
    stage.tell(JobEnded(stage.now_s, member, "stopped", ""))
    assert ("g", "train") in stage.permits() or let_in


def test_a_guest_trains_where_it_did_before_as_long_as_that_is_free() -> None:
    stage = PhaseStage(train_nodes=2)
    guest, other = stage.submit("g", profile=None), stage.submit("h", profile=None)
    took = stage.op(other, OpKind.OPTIM_STEP)
    first = stage.op(guest, OpKind.OPTIM_STEP)
    assert stage.gates[guest] == (NodeId("train-1"),)
    stage.end_op(other, took, OpKind.OPTIM_STEP)
    stage.end_op(guest, first, OpKind.OPTIM_STEP)
    for job in (other, guest):
        stage.end_op(job, stage.op(job, OpKind.PUBLISH), OpKind.PUBLISH)
    stage.op(guest, OpKind.OPTIM_STEP)
    assert stage.gates[guest] == (NodeId("train-1"),)


def test_the_slowdown_of_a_job_that_waits_grows_while_it_waits() -> None:
    stage = PhaseStage()
    member, guest = stage.submit("a"), stage.submit("g", profile=None)
    stage.op(guest, OpKind.OPTIM_STEP)
    turn = stage.turn(member)
    assert stage.keeper.slowdown(member, stage.now_s) is None
    stage.end_turn(turn, 10.0)
    assert stage.keeper.slowdown(member, stage.now_s) == 1.0
    stage.op(member, OpKind.OPTIM_STEP)
    assert stage.keeper.slowdown(member, stage.now_s + 5.0) == 1.5
    assert stage.keeper.slowdown(member, stage.now_s + 20.0) == 3.0


@pytest.mark.parametrize(("slo", "let_in"), [(3.0, True), (1.5, False)])
def test_a_guest_that_members_never_leave_a_node_to_is_let_in_if_they_keep_their_bounds(
    slo: float, let_in: bool
) -> None:
    """Two jobs that train for three quarters of their time: one of them always waits for the train
    node.
    """
    stage = PhaseStage()
    profile = replace(PROFILE, rollout_s=5.0, train_s=15.0)
    members = [stage.submit(name, profile, JobTerms(100, slo)) for name in ("a", "b")]
    guest = stage.submit("g", None)
    for job in (*members, guest):
        stage.turn(job)
    rolling = set(stage.running)
    waiting: dict[JobId, RequestId] = {}
    since_s: dict[JobId, float] = {}
    for _ in range(240):
        stage.now_s += 5.0
        for job in [job for job, began_s in since_s.items() if stage.now_s - began_s >= 15.0]:
            stage.end_op(job, waiting.pop(job), OpKind.OPTIM_STEP)
            del since_s[job]
            stage.turn(job)
        for turn in rolling & set(stage.running):
            stage.end_turn(turn)
            job = JobId(turn.partition(".")[0])
            waiting[job] = stage.op(job, OpKind.OPTIM_STEP)
        rolling = set(stage.running)
        for job in [job for job, nodes in stage.gates.items() if nodes]:
            since_s.setdefault(job, stage.now_s)
    entry = stage.controller.jobs.find(guest)
    assert entry is not None and (entry.profile is not None) == let_in
    assert all(stage.stage_of(job) is JobStage.RUNNING for job in members)
    for job in members:
        slowdown = stage.keeper.slowdown(job, stage.now_s)
        assert slowdown is not None and slowdown <= 1.01 * slo  # it may be in the middle of a wait


def test_who_ends_in_its_last_phase_lost_nothing_but_code_that_holds_a_permit_is_told() -> None:
    stage = PhaseStage()
    a, b = stage.submit("a"), stage.submit("b")
    stage.end_turn(stage.turn(a), 1.0)
    stage.op(a, OpKind.OPTIM_STEP)
    stage.tell(PermitAsked(stage.now_s, b, Phase.ROLLOUT, 0))
    assert ("a", "train") in stage.permits()
    stage.of(PermitEnded)
    for job, why in ((a, ""), (b, "its job is over")):
        stage.tell(JobEnded(stage.now_s, job, "finished"))
        (back,) = stage.of(PermitEnded)
        assert (back.job, back.lost) == (job, why)


def test_a_phase_that_never_ends_is_given_up_and_the_others_go_on() -> None:
    stage = PhaseStage(limits=PhaseLimits(factor=2.0, least_s=5.0, strikes=2))
    a, b = stage.submit("a"), stage.submit("b")
    stuck, waits = stage.turn(a), stage.turn(b)
    stage.fire(WATCH, 30.0)
    (lost,) = [back for back in stage.of(PermitEnded) if back.lost]
    assert lost.job == a and "nothing of its rollout phase ended within 20 s" in lost.lost
    assert waits in stage.running and stuck not in stage.running
    stage.end_turn(waits)
    stage.op(b, OpKind.FORWARD_BACKWARD)
    assert stuck in stage.running  # it is a new arrival, and its turn goes on
    stage.fire(WATCH, 30.0)
    assert stage.stage_of(a) is JobStage.FAILED


def test_a_job_that_asks_for_nothing_keeps_nobody_waiting() -> None:
    stage = PhaseStage()
    a, b = stage.submit("a"), stage.submit("b")
    first, second = stage.turn(a), stage.turn(b)
    stage.end_turn(first, 10.0)
    stage.train(a)
    stage.end_turn(second)
    stage.train(b)
    again = stage.turn(b)
    assert again not in stage.running  # a's turn comes first in a round robin
    stage.fire(f"{REST}{a}", 60.0)
    assert again in stage.running
    stage.end_turn(again)
    stage.train(b)
    back = stage.turn(a)  # it takes part again, and b has nothing to do now
    stage.fire(f"{REST}{b}", 60.0)
    assert back in stage.running


def test_the_end_of_a_job_frees_its_nodes() -> None:
    stage = PhaseStage()
    a, b = stage.submit("a"), stage.submit("b")
    stage.turn(a)
    waits = stage.turn(b)
    stage.tell(JobEnded(stage.now_s, a, "stopped"))
    assert waits in stage.running


def test_a_program_not_heard_of_between_phases_leaves_its_place_to_a_job_that_waits() -> None:
    stage = PhaseStage(limits=PhaseLimits(gone_s=100.0))
    gone = stage.submit("gone", terms=JobTerms(100, 1.0))
    waits = stage.submit("waits", replace(PROFILE, rollout_s=40.0))
    assert stage.stage_of(waits) is JobStage.HELD
    stage.tell(JobHeard(50.0, gone))
    stage.tell(IdleJobsSought(149.0, frozenset({waits})))
    assert stage.stage_of(waits) is JobStage.HELD
    stage.tell(IdleJobsSought(150.0, frozenset({waits})))
    assert stage.stage_of(gone) is JobStage.STOPPED
    assert stage.stage_of(waits) is JobStage.PLACED
    stage.tell(
        JobSubmitted(151.0, gone, TENANT)
    )  # its client comes after all, and says no more than its name
    assert stage.stage_of(gone) is JobStage.HELD


def test_a_duty_ratio_bounds_the_slowdown_as_an_slo_does() -> None:
    assert JobTerms(1, 3.0, duty_ratio=0.2).bound == 1.25
    stage = PhaseStage("ours")
    stage.submit("a", terms=JobTerms(100, 3.0, duty_ratio=0.0))
    held = stage.submit("b", JobProfile(40.0, 40.0, 0.0, 1, 1, 0.0, 0.0, 0.001))
    assert stage.stage_of(held) is JobStage.HELD


def test_a_tail_moves_to_one_engine_and_the_next_rollout_has_the_others() -> None:
    stage = PhaseStage(engines=4)
    a, b = stage.submit("a"), stage.submit("b")
    turns = [stage.turn(a) for _ in range(10)]
    for turn in turns[:7]:
        stage.end_turn(turn, 1.0)
    next_one = stage.turn(b)
    assert next_one not in stage.running
    stage.end_turn(turns[7])
    assert next_one in stage.running
    tail = {stage.running[turn].instance for turn in turns[8:]}
    assert len(tail) == 1 and stage.running[next_one].instance not in tail
    stage.end_turn(turns[8])
    stage.end_turn(turns[9])
    stage.op(a, OpKind.FORWARD_BACKWARD)
    more = [stage.turn(b) for _ in range(30)]
    assert tail & {stage.running[turn].instance for turn in more if turn in stage.running}


def test_a_tail_whose_engine_is_let_go_ends_on_another_of_its_nodes() -> None:
    stage = PhaseStage(engines=4)
    a = stage.submit("a")
    turns = [stage.turn(a) for _ in range(10)]
    stage.turn(stage.submit("b"))
    for turn in turns[:8]:
        stage.end_turn(turn, 1.0)
    (tail,) = {stage.running[turn].instance for turn in turns[8:]}
    stage.tell(of_rollout.DrainRequested(stage.now_s, tail, move_turns=True))
    assert do.ReleaseInstance in map(type, stage.said)
    elsewhere = {stage.running[turn].instance for turn in turns[8:]}
    assert elsewhere and tail not in elsewhere


def test_own_code_is_given_its_permits_again_after_a_restart() -> None:
    stage = PhaseStage()
    stage.tell(PermitsNumbered(0.0, 5))
    a, b = stage.submit("a"), stage.submit("b")
    stage.tell(PermitAsked(0.0, a, Phase.TRAIN, 4, known_as=2))
    stage.tell(PermitAsked(0.0, b, Phase.ROLLOUT, 4, known_as=3))
    held = {
        one.id: one.permit.client_number for one in stage.keeper.jobs() if one.permit is not None
    }
    assert held == {a: 2, b: 3}
    stage.tell(PermitReturned(1.0, a, 2, 0.5))
    stage.tell(PermitReturned(1.0, b, 3, 0.5))
    stage.tell(PermitAsked(1.0, a, Phase.ROLLOUT, 5))
    one = stage.keeper.find(a)
    assert one is not None and one.permit is not None and one.permit.client_number > 5


@pytest.mark.parametrize("placement", ["group", "ours", "horizon"])
def test_a_state_that_no_node_can_keep_warm_is_refused_and_one_that_fits_not_beside_others_waits(
    placement: str,
) -> None:
    """A node keeps 16 GB (`host_memory_gb`)."""
    stage = PhaseStage(placement)
    first = stage.submit("first", replace(PROFILE, train_state_gb=10.0))
    huge = stage.submit("huge", replace(PROFILE, train_state_gb=17.0))
    entry = stage.controller.jobs.find(huge)
    assert entry is not None and entry.stage is JobStage.REFUSED
    assert "keeps 17 GB on a train node and a node has 16 GB of host memory" in entry.reason
    second = stage.submit("second", replace(PROFILE, train_state_gb=10.0))
    assert stage.stage_of(first) is JobStage.PLACED and stage.stage_of(second) is JobStage.HELD
    stage.tell(JobEnded(stage.now_s, first, "finished"))
    assert stage.stage_of(second) is JobStage.PLACED


def test_a_late_message_of_an_old_placement_does_not_end_a_job_that_is_being_profiled() -> None:
    stage = PhaseStage()
    job = stage.submit("stranger", profile=None)
    stage.turn(job)
    assert stage.permits() == [("stranger", "rollout")]
    stage.tell(JobCrashReported(stage.now_s, job, 7))
    stage.tell(JobFinished(stage.now_s, job, 7))
    one = stage.keeper.find(job)
    assert one is not None and one.permit is not None
    assert stage.stage_of(job) is JobStage.PROFILING
