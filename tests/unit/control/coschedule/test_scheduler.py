"""The co-scheduler, one event at a time; invariants are checked after each."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_stage import Stage, job, of

from slackwater.control.coschedule.commands import (
    GrantPermit,
    HoldJob,
    RefuseJob,
    RentNodes,
    ReturnNodes,
    ShrinkRollout,
    StartJob,
    StopJob,
)
from slackwater.control.coschedule.events import (
    JobArrived,
    JobCrashReported,
    JobFinished,
    NodeLost,
    PhaseFinished,
    PhaseRequested,
    ProfilingAsked,
    TailReached,
)
from slackwater.model.ids import JobId, NodeId
from slackwater.model.placement import Phase


def test_an_arriving_job_gets_nodes_and_is_told_to_load() -> None:
    stage = Stage()
    commands = stage.arrive(job("a"))
    assert [type(c) for c in commands] == [RentNodes, StartJob]
    assert stage.starts["a"].epoch == 1


def test_a_job_that_finds_no_room_is_told_why_and_placed_when_there_is() -> None:
    stage = Stage("solo", rollout=1, train=1)
    stage.arrive(job("a"))
    held = stage.arrive(job("b"), 5.0)
    assert len(held) == 1 and isinstance(held[0], HoldJob) and "train" in held[0].reason
    freed = stage.tell(JobFinished(50.0, JobId("a"), 1))
    assert [c.job for c in freed if isinstance(c, StartJob)] == ["b"]


def test_a_job_that_can_never_run_here_is_refused_for_good() -> None:
    stage = Stage("solo", rollout=1, train=1)
    refused = stage.arrive(job("wide", nodes=2))
    assert len(refused) == 1 and isinstance(refused[0], RefuseJob)
    assert "2" in refused[0].reason
    assert stage.arrive(job("wide", nodes=2), 9.0) == []


def test_backfill_lets_a_small_job_pass_a_wide_one_that_waits() -> None:
    for backfill, expected in ((True, ["small"]), (False, [])):
        stage = Stage("solo", rollout=3, train=3, backfill=backfill)
        stage.arrive(job("first", nodes=2))
        stage.arrive(job("second"))
        stage.arrive(job("wide", nodes=3), 1.0)
        stage.arrive(job("small", nodes=1), 2.0)
        commands = stage.tell(JobFinished(50.0, JobId("second"), 1))
        assert [c.job for c in of(StartJob, commands)] == expected


def test_two_jobs_of_a_group_never_hold_the_same_node() -> None:
    stage = Stage(rollout=8, train=8)
    stage.arrive(job("a"))
    stage.arrive(job("b"))
    assert stage.starts["a"].group == stage.starts["b"].group
    stage.request("a", 10)
    assert of(GrantPermit, stage.request("b", 11)) == []
    commands = stage.finish("a", 110)
    assert [c.job for c in of(GrantPermit, commands)] == ["b"]
    assert stage.permits["b"].switch


def test_what_comes_late_or_twice_changes_nothing() -> None:
    stage = Stage()
    spec = job("a")
    stage.arrive(spec)
    assert stage.arrive(spec, 1.0) == []
    stage.request("a", 10)
    first = stage.permits["a"].permit
    assert stage.request("a", 11) == []  # asked again while it runs
    stage.finish("a", 110)
    assert stage.tell(PhaseFinished(111, JobId("a"), first, 100)) == []  # the permit is back
    assert stage.tell(PhaseFinished(111, JobId("a"), 999, 100)) == []  # never was
    assert stage.request("a", 112, Phase.ROLLOUT) == []  # it is at its train phase
    assert stage.tell(PhaseRequested(112, JobId("a"), 7, Phase.TRAIN, 0)) == []  # no such epoch
    stage.request("a", 113, Phase.TRAIN)
    stage.finish("a", 200)
    assert stage.request("a", 201, Phase.ROLLOUT, iteration=0) == []  # of the last iteration
    assert stage.request("a", 202, Phase.ROLLOUT, iteration=1) != []
    assert stage.tell(JobFinished(300, JobId("a"), 4)) == []
    assert stage.tell(JobCrashReported(300, JobId("nobody"), 1)) == []


def test_a_crash_leaves_the_others_of_the_group_alone() -> None:
    stage = Stage()
    stage.arrive(job("a"))
    stage.arrive(job("b"))
    stage.request("a", 10)
    stage.request("b", 10)
    commands = stage.tell(JobCrashReported(60, JobId("a"), 1))
    assert [c.job for c in of(GrantPermit, commands)] == ["b"]
    assert of(StopJob, commands) == [] and of(StartJob, commands) == []
    end = stage.finish("b", 160)
    assert end == []
    assert [c.job for c in of(GrantPermit, stage.request("b", 160, Phase.TRAIN))] == ["b"]


def test_a_recovered_job_is_a_new_arrival_and_resumes_at_its_checkpoint() -> None:
    stage = Stage()
    spec = job("a")
    stage.arrive(spec)
    now = stage.iteration("a", 10, 0)
    now = stage.iteration("a", now, 1)
    stage.tell(JobCrashReported(now + 30, JobId("a"), 1))
    assert stage.tell(JobArrived(now + 40, spec)) == []  # the first arrival, late and doubled
    stage.tell(JobArrived(now + 2000, spec, iterations_done=2, crashes=1))
    assert stage.starts["a"].epoch == 2 and stage.starts["a"].iterations_done == 2
    stage.iteration("a", now + 2100, 2)
    assert stage.scheduler.job(JobId("a")).clock_time_s(now + 2300) == 400 + 200


def test_a_lost_node_stops_just_the_jobs_that_are_pinned_to_it() -> None:
    stage = Stage("solo")
    stage.arrive(job("a"))
    stage.arrive(job("b"))
    lost = stage.starts["a"].train_nodes[0]
    commands = stage.tell(NodeLost(100, lost))
    assert [(c.job, c.moves) for c in of(StopJob, commands)] == [("a", False)]
    assert lost in next(c.nodes for c in commands if isinstance(c, ReturnNodes))
    assert stage.tell(NodeLost(101, NodeId("train-77"))) == []


def test_a_tail_moves_aside_only_for_someone_who_waits() -> None:
    stage = Stage()
    stage.arrive(job("a"))
    stage.arrive(job("b"))
    stage.request("a", 10)
    permit = stage.permits["a"].permit
    assert stage.tell(TailReached(60, JobId("a"), permit)) == []
    stage.request("b", 65)
    commands = stage.tell(TailReached(70, JobId("a"), permit))
    assert [type(c) for c in commands] == [ShrinkRollout, GrantPermit]
    assert stage.permits["b"].phase is Phase.ROLLOUT
    stage.finish("a", 100)
    assert of(GrantPermit, stage.request("a", 100, Phase.TRAIN))


def test_nodes_that_no_one_uses_are_given_back_when_the_last_job_leaves() -> None:
    stage = Stage()
    stage.arrive(job("a"))
    commands = stage.tell(JobFinished(500, JobId("a"), 1))
    assert len(next(c.nodes for c in commands if isinstance(c, ReturnNodes))) == 2
    assert stage.policy.hourly_cost() == 0


def test_lengths_beyond_the_declared_ones_are_taken_over_as_drift() -> None:
    stage = Stage()
    stage.arrive(job("a", 100, 100, iterations=40))
    now = 10.0
    for number in range(6):
        now = stage.iteration("a", now, number, work_s=130)
    assert stage.scheduler.job(JobId("a")).profile.rollout_s > 130
    assert stage.scheduler.job(JobId("a")).spec.profile.rollout_s == 100


def test_lengths_within_the_declared_ones_are_no_drift() -> None:
    stage = Stage()
    stage.arrive(job("a", 100, 100, iterations=40))
    now = 10.0
    for number in range(6):
        now = stage.iteration("a", now, number, work_s=100)
    assert stage.scheduler.job(JobId("a")).profile.rollout_s == 100


@given(st.lists(st.floats(10, 100), min_size=1, max_size=8), st.floats(150, 1000), st.data())
def test_one_long_iteration_is_no_drift_wherever_it_comes_and_two_in_a_row_are(
    usual: list[float], long_s: float, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(usual)))
    for longs in (1, 2):
        stage = Stage()
        stage.arrive(job("a", 100, 100, iterations=40))
        now = 10.0
        for number, work_s in enumerate([*usual[:at], *[long_s] * longs, *usual[at:]]):
            now = stage.iteration("a", now, number, work_s)
        known = stage.scheduler.job(JobId("a")).profile
        if longs == 1:
            assert (known.rollout_s, known.train_s) == (100, 100)
        elif at == 0 or long_s > 500:
            assert min(known.rollout_s, known.train_s) > 100


@pytest.mark.parametrize(("short_s", "shared"), [(80, 0.0), (40, 0.15)])
def test_time_won_by_short_iterations_is_kept_and_time_won_by_running_fast_is_shared(
    short_s: float, shared: float
) -> None:
    """Some of the former is shared too where they are far shorter than declared."""
    stage = Stage()
    stage.arrive(job("a", 100, 100, slo=2.0, iterations=20))
    state = stage.scheduler.job(JobId("a"))
    now = 10.0
    for number in range(5):
        now = stage.iteration("a", now, number, work_s=100)
    assert state.budget_to_share_s(now) == state.budget_s(now) == 2 * 20 * 200 - 1000
    for number in range(5, 10):
        now = stage.iteration("a", now, number, work_s=short_s)
    took_s = 1000 + 5 * 2 * short_s
    assert state.budget_s(now) == 2 * 20 * 200 - took_s
    own_s = 2 * (15 * 200 + 5 * 2 * short_s) - took_s
    won_s = state.budget_s(now) - own_s
    assert state.budget_to_share_s(now) == pytest.approx(own_s + shared * won_s)


@pytest.mark.parametrize(("owned", "next_in"), [(True, "long"), (False, "short")])
def test_of_those_that_wait_an_owned_fleet_takes_the_longest_and_a_rented_one_the_first(
    owned: bool, next_in: str
) -> None:
    stage = Stage("ours", rollout=1, train=1, owned=owned)
    stage.arrive(job("a", 100, 100, slo=1.0, iterations=1))
    stage.arrive(job("short", 100, 100, slo=1.0, iterations=5))
    stage.arrive(job("long", 100, 100, slo=1.0, iterations=50))
    stage.iteration("a", 10, 0)
    stage.tell(JobFinished(210, JobId("a"), stage.starts["a"].epoch))
    assert list(stage.starts) == ["a", next_in]


def test_a_jobs_clock_starts_with_its_first_permit_and_a_wait_counts() -> None:
    stage = Stage()
    stage.arrive(job("a"))
    stage.arrive(job("b"))
    stage.request("a", 10)
    stage.request("b", 20)
    assert stage.scheduler.job(JobId("b")).clock_time_s(60) == 0
    stage.finish("a", 110)
    assert stage.scheduler.job(JobId("b")).clock_time_s(160) == 50
    stage.request("a", 110, Phase.TRAIN)
    stage.finish("a", 210)
    stage.request("a", 210, Phase.ROLLOUT, iteration=1)
    assert stage.scheduler.job(JobId("a")).clock_time_s(300) == 290


def late_iteration(elapsed_s: float) -> list[JobId]:
    """Two jobs share nodes; the first one's first iteration ends after `elapsed_s`. Answers who is
    moved.
    """
    stage = Stage("group", guard=True)
    stage.arrive(job("a", slo=2.0, iterations=20))
    stage.arrive(job("b", slo=2.0, iterations=20))
    stage.request("a", 10)
    stage.finish("a", 110)
    stage.request("a", 110, Phase.TRAIN)
    commands = stage.finish("a", 10 + elapsed_s)
    assert [c.job for c in of(StartJob, commands)] == [c.job for c in of(StopJob, commands)]
    return [c.job for c in of(StopJob, commands)]


def test_the_guard_gives_a_job_its_own_nodes_just_before_its_slo_could_break() -> None:
    """19 iterations alone take 3,800 s and the move 197 s; the bound is 8,000 s."""
    assert late_iteration(3300) == []
    assert late_iteration(3800) == ["a"]


def test_the_guard_leaves_a_job_where_it_is_when_a_move_would_surely_break_its_slo() -> None:
    assert late_iteration(4100) == []


def test_a_newcomer_waits_for_a_moment_that_costs_a_tight_member_nothing() -> None:
    """a has no time to lose; b may not push its rollout in before a's own, only behind it."""
    stage = Stage()
    stage.arrive(job("a", 100, 100, slo=1.0, iterations=40))
    stage.request("a", 0)
    stage.finish("a", 100)
    stage.request("a", 100, Phase.TRAIN)
    stage.arrive(job("b", 100, 100, slo=1.5, iterations=40), 120)
    assert stage.starts["b"].group == stage.starts["a"].group
    assert of(GrantPermit, stage.request("b", 150)) == []  # its rollout would last until 250
    stage.finish("a", 200)
    assert [c.job for c in of(GrantPermit, stage.request("a", 200, Phase.ROLLOUT, 1))] == ["a"]
    assert [c.job for c in of(GrantPermit, stage.finish("a", 300))] == ["b"]
    assert [c.job for c in of(GrantPermit, stage.request("a", 300, Phase.TRAIN, 1))] == ["a"]


@pytest.mark.parametrize("nodes", [1, 8])
def test_a_newcomer_that_no_moment_lets_in_gets_nodes_of_its_own_or_waits_on(nodes: int) -> None:
    """a, whose iterations are bounded, is late in one of them: whoever joins makes it later."""
    stage = Stage("ours", rollout=nodes, train=nodes)
    stage.arrive(replace(job("a", iterations=400), slo_scope="iteration"))
    stage.request("a", 0)
    stage.arrive(job("b", iterations=400), 10)
    assert stage.starts["b"].group == stage.starts["a"].group
    assert stage.request("b", 390) == []
    commands = stage.finish("a", 1500)
    assert [c.job for c in of(StartJob, commands)] == (["b"] if nodes > 1 else [])
    stage.request("a", 1500, Phase.TRAIN)
    stage.finish("a", 1600)
    stage.request("b", 1600)
    assert "b" in stage.permits


def test_a_member_has_its_node_again_when_the_guest_that_it_was_kept_for_is_gone() -> None:
    """Both rollout nodes are kept for a guest; it leaves before the second one is free."""
    stage = Stage("solo", rollout=2, train=2)
    stage.arrive(job("a", slo=9.0))
    stage.arrive(job("b", slo=9.0))
    stage.request("a", 0.0)
    stage.request("b", 0.0)
    guest = JobId("g")
    stage.tell(ProfilingAsked(0.0, guest, 2, 1))
    stage.tell(PhaseRequested(0.0, guest, 0, Phase.ROLLOUT, 0))
    stage.finish("a", 500.0)
    stage.request("a", 500.0, Phase.TRAIN)
    stage.finish("a", 600.0)
    assert not of(GrantPermit, stage.request("a", 600.0, iteration=1)), "its node is kept"
    (granted,) = of(GrantPermit, stage.tell(JobFinished(650.0, guest, 0)))
    assert granted.job == "a" and granted.phase is Phase.ROLLOUT
