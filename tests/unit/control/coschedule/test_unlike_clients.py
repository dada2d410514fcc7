"""Clients that do not roll out and train in turn: they sample only, train only, or stop in the
middle; the others go on.
"""

from dataclasses import replace

from phase_stage import PROFILE, PhaseStage

from slackwater.control.coschedule.commands import PermitEnded
from slackwater.control.coschedule.phase_controller import WATCH
from slackwater.control.coschedule.phase_cycle import REST
from slackwater.control.coschedule.phase_events import PermitAsked
from slackwater.control.coschedule.phase_watch import PhaseLimits
from slackwater.control.jobs.events import JobEnded
from slackwater.control.timer import SetTimer
from slackwater.model.ids import JobId
from slackwater.model.job import JobTerms
from slackwater.model.job_life import JobStage
from slackwater.model.operation import OpKind
from slackwater.model.placement import Phase

STEP = (OpKind.FORWARD_BACKWARD, OpKind.OPTIM_STEP)


def step(stage: PhaseStage, job: JobId, took_s: float) -> None:
    for kind in STEP:
        stage.end_op(job, stage.op(job, kind), kind, took_s / len(STEP))


def test_an_iteration_that_has_nothing_to_train_on_ends_when_the_weights_are_published_again() -> (
    None
):
    stage = PhaseStage()
    a, b = stage.submit("a"), stage.submit("b")
    first, other = stage.turn(a), stage.turn(b)
    publish = stage.op(a, OpKind.PUBLISH)
    assert other not in stage.running  # a turn is still open: it may be of the same iteration
    stage.end_op(a, publish, OpKind.PUBLISH)
    stage.end_turn(first, 10.0)
    assert other not in stage.running
    stage.op(a, OpKind.PUBLISH)
    assert other in stage.running
    again = stage.turn(a)
    stage.end_turn(other, 10.0)
    stage.train(b)
    assert again in stage.running


def test_nodes_with_which_a_client_does_nothing_are_anothers_when_it_waits() -> None:
    stage = PhaseStage(limits=PhaseLimits(rest_s=2.0))
    a, b = stage.submit("a"), stage.submit("b")
    stage.end_turn(stage.turn(a), 10.0)
    stage.fire(f"{REST}{a}", 5.0)
    more = stage.turn(a)
    assert more in stage.running and stage.permits() == [("a", "rollout")]  # nobody waited
    stage.end_turn(more, 1.0)
    other = stage.turn(b)
    stage.fire(f"{REST}{a}", 1.0)
    assert other not in stage.running
    stage.fire(f"{REST}{a}", 1.0)
    assert other in stage.running
    stage.op(a, OpKind.FORWARD_BACKWARD)  # it had computed its rewards meanwhile
    assert ("a", "train") in stage.permits()
    state = stage.keeper.scheduler.find(a)
    assert state is not None and state.observed_s == 16.0  # until the last of its turns


def test_a_client_that_only_trains_is_kept_and_others_have_their_turn_between_its_steps() -> None:
    stage = PhaseStage(limits=PhaseLimits(unknown_s=60.0))
    a = stage.submit("a", profile=None)
    for _ in range(60):
        step(stage, a, 4.0)
        stage.fire(WATCH, 0.0)
    assert not [back for back in stage.of(PermitEnded) if back.lost]
    entry = stage.controller.jobs.find(a)
    assert entry is not None and entry.stage is not JobStage.FAILED
    assert entry.profile is not None and entry.profile.train_s == 4.0
    assert entry.iterations_done == 60 - 14  # the first minute is one iteration
    b = stage.submit("b")
    under_way = [(stage.op(a, kind), kind) for kind in STEP]
    following = [(stage.op(a, kind), kind) for kind in STEP]  # it sends them ahead
    stage.permits()
    other = stage.turn(b)
    for request, kind in under_way:
        stage.end_op(a, request, kind, 2.0)
    assert stage.permits() == [("b", "rollout"), ("a", "train")]
    stage.end_turn(other, 1.0)
    stage.op(b, OpKind.FORWARD_BACKWARD)
    assert stage.permits() == []
    for request, kind in following:
        stage.end_op(a, request, kind, 2.0)
    assert stage.permits() == [("b", "train")]
    stage.turn(a)  # it samples after all: what it trains on next is an iteration again
    one = stage.keeper.find(a)
    assert one is not None and not one.trains_only


def test_a_job_that_trains_on_lets_in_another_whose_turn_comes_after_its_next_rollout() -> None:
    stage = PhaseStage(limits=PhaseLimits(share_after=5.0, least_s=1000.0))
    a, b = stage.submit("a"), stage.submit("b")
    step(stage, a, 12.0)  # longer than it said: by the plan it rolls out next, and b after it
    stage.permits()
    stage.tell(PermitAsked(stage.now_s, b, Phase.ROLLOUT, 0))
    while stage.now_s < 100.0 and not (given := stage.permits()):
        step(stage, a, 1.0)
    assert ("b", "rollout") in given and stage.now_s <= 5 * PROFILE.train_s + 1.0


def test_a_job_that_only_trains_goes_on_while_another_rolls_out_and_yields_when_it_waits() -> None:
    stage = PhaseStage(limits=PhaseLimits(share_after=1.0, least_s=1.0))
    a, b = stage.submit("a"), stage.submit("b")
    step(stage, a, 11.0)  # longer than it said: it only trains
    rolling = stage.turn(b)
    step(stage, a, 1.0)
    stage.permits()
    steps = 5
    ahead = [(stage.op(a, kind), kind) for _ in range(steps) for kind in STEP]
    for request, kind in ahead[:-2]:
        stage.end_op(a, request, kind, 1.0)
    assert stage.permits() == [] and rolling in stage.running  # all in one phase, beside b's
    stage.end_turn(rolling)
    stage.op(b, OpKind.FORWARD_BACKWARD)
    assert stage.permits() == []  # a's step is not over
    for request, kind in ahead[-2:]:
        stage.end_op(a, request, kind, 1.0)
    assert stage.permits() == [("b", "train")]


def test_an_iteration_of_many_steps_is_one_even_if_it_takes_long() -> None:
    stage = PhaseStage(limits=PhaseLimits(share_after=5.0, least_s=1.0))
    a = stage.submit("a")
    stage.end_turn(stage.turn(a), 10.0)
    for _ in range(4):
        step(stage, a, 10.0)  # ten seconds is what it said of all
    assert stage.permits() == [("a", "rollout"), ("a", "train")]


def test_a_client_that_samples_on_and_on_is_not_given_up_and_lets_others_in() -> None:
    limits = PhaseLimits(least_s=20.0, factor=2.0, share_after=5.0)  # of the ten seconds it said
    stage = PhaseStage(limits=limits)
    a, b = stage.submit("a"), stage.submit("b")
    running = stage.turn(a)
    for _ in range(30):
        following = stage.turn(a)
        stage.end_turn(running, 10.0)
        stage.fire(WATCH, 0.0)
        running = following
    assert running in stage.running and stage.permits() == [("a", "rollout")]
    other = stage.turn(b)
    stage.fire(WATCH, 1.0)
    assert other in stage.running and running not in stage.running
    assert not [back for back in stage.of(PermitEnded) if back.lost]
    stage.end_turn(other, 1.0)
    stage.op(b, OpKind.FORWARD_BACKWARD)
    assert running in stage.running


def test_the_time_in_which_a_client_asks_for_nothing_is_not_its_slowdown() -> None:
    stage = PhaseStage()
    a = stage.submit("a")
    for _ in range(3):
        stage.end_turn(stage.turn(a), 10.0)
        stage.train(a, 10.0)
        stage.fire(f"{REST}{a}", 1000.0)
    assert stage.keeper.slowdown(a, stage.now_s) == 1.0


def test_a_job_that_rests_for_long_makes_room_when_another_waits_for_a_place() -> None:
    stage = PhaseStage(limits=PhaseLimits(yield_s=60.0))
    rests = stage.submit("rests", terms=JobTerms(100, 1.0))
    stage.end_turn(stage.turn(rests), 10.0)
    stage.train(rests)
    stage.fire(f"{REST}{rests}", 600.0)
    assert stage.stage_of(rests) is JobStage.RUNNING  # nobody waits
    waits = stage.submit("waits", replace(PROFILE, rollout_s=40.0), JobTerms(100, 1.0))
    assert stage.stage_of(waits) is JobStage.HELD
    assert any(timer.name == f"{REST}{rests}" for timer in stage.of(SetTimer))
    stage.fire(f"{REST}{rests}", 2.0)
    assert stage.stage_of(waits) is JobStage.PLACED
    entry = stage.controller.jobs.find(rests)
    assert entry is not None and "asked for nothing for 602 s" in entry.reason
    assert stage.stage_of(rests) is JobStage.HELD
    again = stage.turn(rests)
    assert stage.stage_of(rests) is JobStage.HELD and "asked for nothing" not in entry.reason
    stage.tell(JobEnded(stage.now_s, waits, "finished"))
    assert again in stage.running and stage.stage_of(rests) is JobStage.PLACED
    one = stage.keeper.find(rests)
    assert one is not None and one.iteration == 1


def test_a_job_that_rests_for_a_moment_keeps_its_place() -> None:
    stage = PhaseStage(limits=PhaseLimits(yield_s=60.0))
    stage.now_s = 1000.0
    rests = stage.submit("rests", terms=JobTerms(100, 1.0))
    waits = stage.submit("waits", replace(PROFILE, rollout_s=40.0), JobTerms(100, 1.0))
    stage.fire(f"{REST}{rests}", 59.0)  # it starts
    assert stage.stage_of(waits) is JobStage.HELD
    stage.end_turn(stage.turn(rests), 10.0)
    stage.train(rests)
    stage.fire(f"{REST}{rests}", 59.0)
    assert stage.stage_of(waits) is JobStage.HELD
    assert stage.turn(rests) in stage.running
    stage.fire(f"{REST}{rests}", 600.0)
    assert stage.stage_of(waits) is JobStage.HELD


def test_a_client_that_was_profiled_as_only_training_lets_others_in_after_each_step() -> None:
    stage = PhaseStage()
    a, b = stage.submit("a", profile=None), stage.submit("b")
    for _ in range(2):
        turn, steps = stage.turn(b), [(stage.op(a, kind), kind) for kind in STEP]
        assert ("a", "train") in stage.permits()  # it waits for no rollout node
        stage.end_turn(turn, 10.0)
        passed = stage.op(b, OpKind.OPTIM_STEP)
        for request, kind in steps:
            stage.end_op(a, request, kind, 1.0)
        stage.end_op(b, passed, OpKind.OPTIM_STEP, 10.0)
        stage.end_op(b, stage.op(b, OpKind.PUBLISH), OpKind.PUBLISH)
    assert stage.stage_of(a) is JobStage.PLACED
    steps = [(stage.op(a, kind), kind) for kind in (*STEP, *STEP)]
    stage.fire(f"{REST}{b}", 3.0)
    assert ("a", "train") in stage.permits()
    stage.end_turn(stage.turn(b), 1.0)
    stage.op(b, OpKind.OPTIM_STEP)
    assert ("b", "train") not in stage.permits()
    for request, kind in steps[: len(STEP)]:
        stage.end_op(a, request, kind, 1.0)
    assert ("b", "train") in stage.permits()


def test_a_client_s_own_time_between_its_phases_is_not_its_slowdown() -> None:
    stage = PhaseStage()
    a = stage.submit("a")
    for _ in range(3):
        stage.end_turn(stage.turn(a), 10.0)
        stage.train(a, 10.0)
        stage.now_s += 1.5
        assert stage.keeper.slowdown(a, stage.now_s) == 1.0
