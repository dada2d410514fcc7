"""Trajectories that ended lately, whole and bounded."""

import math

from slackwater.control.rollout.commands import CompleteTurn
from slackwater.model.ids import JobId, TrajectoryId, TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import FinishReason, TurnSpec
from slackwater.runtime.executors.recent_trajectories import (
    EndedTurn,
    RecentTrajectories,
    join_turns,
)


def end_turn(
    recent: RecentTrajectories,
    trajectory: str,
    prompt: list[int],
    sampled: list[int],
    *,
    job: str = "mine/a",
    took_s: tuple[float, float] = (0.0, 1.0),
) -> None:
    name = TurnId(f"{trajectory}/{len(prompt)}")
    spec = TurnSpec(
        name, TrajectoryId(trajectory), JobId(job), prompt, Sampling(max_tokens=9), "base:m"
    )
    result = CompleteTurn(name, sampled, [-0.5] * len(sampled), FinishReason.STOP, "base:m", 0)
    recent.record_turn(spec, result, *took_s)


def test_turns_of_a_trajectory_join_into_one_conversation() -> None:
    recent = RecentTrajectories()
    end_turn(recent, "t", [1, 2], [3, 4])
    end_turn(recent, "t", [1, 2, 3, 4, 9], [5], took_s=(7.0, 8.0))
    (found,) = recent.trajectories_of(JobId("mine/a"), 0.0)
    tokens, logprobs = join_turns(found.turns)
    assert tokens.tolist() == [1, 2, 3, 4, 9, 5]
    assert [math.isnan(value) for value in logprobs] == [True, True, False, False, True, False]
    assert (found.began_s, found.ended_s, found.sampled_tokens) == (0.0, 8.0, 3)
    assert recent.find(JobId("other/b"), "t") is None


def test_a_prompt_that_begins_anew_is_shown_alone() -> None:
    recent = RecentTrajectories()
    end_turn(recent, "t", [1, 2], [3])
    end_turn(recent, "t", [7, 8, 9, 9], [5])
    (found,) = recent.trajectories_of(JobId("mine/a"), 0.0)
    assert join_turns(found.turns)[0].tolist() == [7, 8, 9, 9, 5]


def test_the_slowest_come_first_and_the_oldest_go() -> None:
    each = EndedTurn([1] * 10, [2], [0.0]).held_tokens
    recent = RecentTrajectories(of_a_job=3, max_tokens=3 * each)
    for number, took_s in enumerate((9.0, 1.0, 3.0, 2.0)):
        end_turn(recent, f"t{number}", [1] * 10, [2], took_s=(0.0, took_s))
    names = [one.trajectory for one in recent.trajectories_of(JobId("mine/a"), 0.0)]
    assert names == ["t2", "t3", "t1"]
    end_turn(recent, "long", [1] * 90, [2], job="mine/b")
    assert recent.trajectories_of(JobId("mine/a"), 0.0) == []
    assert recent.held_tokens == each + 80
    end_turn(recent, "longer", [1] * 300, [2], job="mine/b")
    assert recent.trajectories_of(JobId("mine/b"), 0.0) == [] and recent.held_tokens == 0


def test_what_somebody_was_shown_is_there_for_a_minute_whatever_else_ends() -> None:
    recent, job = RecentTrajectories(of_a_job=2), JobId("mine/a")
    end_turn(recent, "shown", [1], [2])
    assert [one.trajectory for one in recent.trajectories_of(job, 1.0)] == ["shown"]
    for number in range(100):
        end_turn(recent, f"t{number}", [1], [2], took_s=(0.0, 60.0))
    assert recent.find(job, "shown") is not None
    end_turn(recent, "late", [1], [2], took_s=(0.0, 62.0))  # nobody has looked for a minute
    assert recent.find(job, "shown") is None
    assert len(recent.trajectories_of(job, 63.0)) == 2


def test_who_continues_anothers_conversation_adds_nothing_to_what_that_one_sees() -> None:
    recent = RecentTrajectories()
    end_turn(recent, "t", [1, 2], [3])
    end_turn(recent, "t", [1, 2, 3], [4], job="other/b")
    (mine,) = recent.trajectories_of(JobId("mine/a"), 0.0)
    (others,) = recent.trajectories_of(JobId("other/b"), 0.0)
    assert join_turns(mine.turns)[0].tolist() == [1, 2, 3]
    assert join_turns(others.turns)[0].tolist() == [1, 2, 3, 4]
