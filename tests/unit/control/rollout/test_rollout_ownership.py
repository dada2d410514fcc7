"""The manager owns a turn's tokens, whatever instances do."""

from collections.abc import Sequence
from typing import Any

import pytest
from fleet_driver import FleetDriver, dispatches, none_of, only

from slackwater.control.fleet.messages import FleetCommand
from slackwater.control.rollout.commands import (
    AbortTurn,
    AppendTokens,
    CompleteTurn,
    DispatchTurn,
    FailTurn,
    ReleaseInstance,
    ReportFault,
    StreamTokens,
)
from slackwater.control.rollout.events import (
    InstanceLost,
    PromptScored,
    TokensArrived,
    TurnCancelled,
    TurnRefused,
)
from slackwater.model.ids import InstanceId, TurnId
from slackwater.model.instance import InstanceKind
from slackwater.model.turn import AttemptId, FinishReason

A, B = InstanceId("a"), InstanceId("b")


@pytest.fixture
def driver() -> FleetDriver:
    driver = FleetDriver()
    driver.join("a")
    return driver


def test_a_turn_is_whole_when_its_instance_says_so_and_all_tokens_are_there(
    driver: FleetDriver,
) -> None:
    sent = only_dispatch(driver.submit("t"))
    driver.tokens("a", sent.attempt, [7, 8])
    done = only(CompleteTurn, driver.end("a", sent.attempt, 2))
    assert (list(done.tokens), done.reason, done.moves) == ([7, 8], FinishReason.STOP, 0)


def test_a_lost_instance_costs_no_token_and_the_rest_is_asked_for_elsewhere(
    driver: FleetDriver,
) -> None:
    sent = only_dispatch(driver.submit("t"))
    driver.join("b")
    driver.tokens("a", sent.attempt, [7, 8])
    moved = only_dispatch(driver.happen(InstanceLost(1.0, A, "killed")))
    assert (moved.instance, list(moved.generated), moved.sampling.max_tokens) == ("b", [7, 8], 8)
    driver.tokens("b", moved.attempt, [9])
    done = only(CompleteTurn, driver.end("b", moved.attempt, 3))
    assert (list(done.tokens), done.moves) == ([7, 8, 9], 1)


def test_tokens_count_for_the_kind_of_instance_that_ends_their_turn(driver: FleetDriver) -> None:
    sent = only_dispatch(driver.submit("t"))
    driver.join("b", kind=InstanceKind.DEDICATED)
    driver.tokens("a", sent.attempt, [7, 8])
    moved = only_dispatch(driver.happen(InstanceLost(1.0, A, "killed")))
    driver.tokens("b", moved.attempt, [9])
    driver.end("b", moved.attempt, 3)
    assert driver.manager.tokens_by_source() == {"job": {"dedicated": 3}}


def test_late_replies_of_an_older_attempt_change_nothing(driver: FleetDriver) -> None:
    sent = only_dispatch(driver.submit("t"))
    driver.join("b")
    driver.happen(InstanceLost(1.0, A, "cut off"))
    driver.join("a")  # the same name comes back, with frames of its former life
    assert driver.tokens("a", sent.attempt, [7]) == []
    assert driver.end("a", sent.attempt, 1) == []
    assert len(driver.manager.state.turns[TurnId("t")].tokens) == 0


def test_a_move_never_resets_the_token_budget(driver: FleetDriver) -> None:
    sent = only_dispatch(driver.submit("t", max_tokens=3))
    driver.tokens("a", sent.attempt, [7, 8, 9])
    done = only(CompleteTurn, driver.happen(InstanceLost(1.0, A, "killed")))
    assert (list(done.tokens), done.reason) == ([7, 8, 9], FinishReason.LENGTH)


def test_a_stop_token_that_arrived_before_the_loss_ends_the_turn(driver: FleetDriver) -> None:
    sent = only_dispatch(driver.submit("t", sampling={"stop_token_ids": (9,)}))
    driver.tokens("a", sent.attempt, [7, 9])
    done = only(CompleteTurn, driver.happen(InstanceLost(1.0, A, "killed")))
    assert done.reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("tokens", "total", "version", "reason"),
    [
        ([7, 8], 3, "v1", FinishReason.STOP),  # a token went missing
        ([7, 8], 2, "v0", FinishReason.STOP),  # other weights
        ([7, 8], 2, "v1", FinishReason.LENGTH),  # cut before the budget or the context ended
    ],
)
def test_an_ending_that_contradicts_what_was_received_is_undone_and_the_turn_goes_on_elsewhere(
    driver: FleetDriver, tokens: list[int], total: int, version: str, reason: FinishReason
) -> None:
    sent = only_dispatch(driver.submit("t"))
    driver.join("b", max_running=9)
    driver.tokens("a", sent.attempt, tokens)
    commands = driver.end("a", sent.attempt, total, version=version, reason=reason)
    assert only(ReportFault, commands).instance == "a"
    assert none_of(CompleteTurn, commands)
    again = only_dispatch(commands)
    assert list(again.generated) == []
    assert again.attempt != sent.attempt


def test_tokens_beyond_the_budget_are_a_fault_and_are_not_kept(driver: FleetDriver) -> None:
    sent = only_dispatch(driver.submit("t", max_tokens=2))
    commands = driver.tokens("a", sent.attempt, [7, 8, 9])
    assert only(ReportFault, commands).instance == "a"
    assert only(AbortTurn, commands).attempt == sent.attempt
    assert len(driver.manager.state.turns[TurnId("t")].tokens) == 0


@pytest.mark.parametrize(
    "frame",
    [
        {"attempts": [1], "tokens": [7, 8], "logprobs": [-1.0]},
        {"attempts": [1], "tokens": [-1], "logprobs": [-1.0]},
        {"attempts": [1], "tokens": [2**40], "logprobs": [-1.0]},
        {"attempts": [1], "tokens": [7], "logprobs": [-1.0], "counts": [0]},
        {"attempts": [999], "tokens": [7], "logprobs": [-1.0]},
        {"attempts": [-1], "tokens": [7], "logprobs": [-1.0]},
        {"attempts": [2**40], "tokens": [7], "logprobs": [-1.0]},
    ],
)
def test_a_garbage_frame_is_reported_and_changes_no_turn(
    driver: FleetDriver, frame: dict[str, Any]
) -> None:
    driver.submit("t")
    driver.happen(TokensArrived(1.0, A, [1], [5], [-1.0]))
    commands = driver.happen(TokensArrived(1.0, A, **frame))
    assert only(ReportFault, commands).instance == "a"
    assert list(driver.manager.state.turns[TurnId("t")].tokens) == [5]


def test_an_instance_that_keeps_lying_is_released_and_its_turns_go_on(driver: FleetDriver) -> None:
    driver.join("b")
    sent = {d.instance: d for name in "tu" for d in dispatches(driver.submit(name))}
    assert set(sent) == {"a", "b"}
    for _ in range(3):
        driver.tokens("a", 999, [7])
    commands = driver.tokens("a", 999, [7])
    assert only(ReleaseInstance, commands).instance == "a"
    assert only_dispatch(commands).instance == "b"


def test_a_turn_at_fault_fails_alone(driver: FleetDriver) -> None:
    bad, good = (only_dispatch(driver.submit(name)) for name in ("bad", "good"))
    commands = driver.happen(TurnRefused(1.0, A, AttemptId(bad.attempt), "over the context", True))
    assert only(FailTurn, commands).error == "over the context"
    driver.tokens("a", good.attempt, [7])
    assert only(CompleteTurn, driver.end("a", good.attempt, 1)).turn == "good"


def test_a_turn_that_every_instance_dies_under_fails_in_the_end(driver: FleetDriver) -> None:
    driver.submit("poison")
    for _ in range(8):
        assert none_of(FailTurn, driver.happen(InstanceLost(1.0, A, "segfault")))
        driver.join("a")
    failed = only(FailTurn, driver.happen(InstanceLost(1.0, A, "segfault")))
    assert "9 instances in a row" in failed.error


def test_a_deadline_ends_a_turn_that_waits_for_nobody(driver: FleetDriver) -> None:
    driver.happen(InstanceLost(0.0, A, "killed"))
    driver.submit("t", deadline_s=30.0)
    assert none_of(FailTurn, driver.watch(29.0))
    assert "waiting for an instance" in only(FailTurn, driver.watch(1.0)).error


def test_a_cancelled_turn_is_stopped_and_its_room_used(driver: FleetDriver) -> None:
    sent = [only_dispatch(driver.submit(f"t{i}")) for i in range(4)]
    assert dispatches(driver.submit("next")) == []
    commands = driver.happen(TurnCancelled(1.0, TurnId("t2")))
    assert only(AbortTurn, commands).attempt == sent[2].attempt
    assert only_dispatch(commands).turn == "next"


def test_a_prompt_without_room_in_any_context_is_refused_at_once(driver: FleetDriver) -> None:
    failed = only(FailTurn, driver.submit("t", prompt=range(1000)))
    assert "1000 tokens" in failed.error


def test_a_streamed_turn_shows_every_position_once_even_after_a_rollback(
    driver: FleetDriver,
) -> None:
    sent = only_dispatch(driver.submit("t", stream=True))
    shown = list(only(AppendTokens, driver.tokens("a", sent.attempt, [7, 8])).tokens)
    again = only_dispatch(driver.end("a", sent.attempt, 5))
    assert none_of(AppendTokens, driver.tokens("a", again.attempt, [7]))
    shown += only(AppendTokens, driver.tokens("a", again.attempt, [8, 9])).tokens
    assert shown == [7, 8, 9]


def streamed(shown: dict[str, list[int]], commands: Sequence[FleetCommand]) -> None:
    for command in commands:
        if isinstance(command, AppendTokens):
            shown[command.turn] += command.tokens
        elif isinstance(command, StreamTokens):
            tokens = iter(command.tokens)
            counts = command.counts or [1] * len(command.turns)
            for turn, count in zip(command.turns, counts, strict=True):
                shown[turn] += [next(tokens) for _ in range(count)]
            assert not list(tokens)


def test_streams_of_one_frame_come_as_columns_each_position_once(driver: FleetDriver) -> None:
    shown: dict[str, list[int]] = {"t0": [], "t1": [], "t2": []}
    sent = [only_dispatch(driver.submit(f"t{n}", stream=n < 2)) for n in range(3)]
    attempts, columns = [one.attempt for one in sent], list[int]()
    for step in range(1, 6):
        said = driver.happen(TokensArrived(0.0, A, attempts, [step] * 3, [-1.0] * 3))
        columns += [len(one.turns) for one in said if isinstance(one, StreamTokens)]
        streamed(shown, said)
    said = driver.happen(TokensArrived(0.0, A, attempts, [6, 7, 6, 6], [-1.0] * 4, [2, 1, 1]))
    streamed(shown, said)
    assert columns == [2] * 4  # of no turn the first
    assert shown == {"t0": [1, 2, 3, 4, 5, 6, 7], "t1": [1, 2, 3, 4, 5, 6], "t2": []}
    again = only_dispatch(driver.end("a", attempts[0], 9))  # which is false: it begins anew
    for step in range(1, 9):
        said = driver.happen(TokensArrived(0.0, A, [again.attempt], [step], [-1.0]))
        streamed(shown, said)
    assert shown == {"t0": [1, 2, 3, 4, 5, 6, 7, 8], "t1": [1, 2, 3, 4, 5, 6], "t2": []}


def test_prompt_scores_survive_a_move_and_are_not_asked_for_twice(driver: FleetDriver) -> None:
    sent = only_dispatch(driver.submit("t", sampling={"prompt_logprobs": True}))
    assert sent.score_prompt
    driver.happen(PromptScored(0.0, A, sent.attempt, [None, -1.0, -2.0]))
    driver.tokens("a", sent.attempt, [7])
    driver.join("b")
    moved = only_dispatch(driver.happen(InstanceLost(1.0, A, "killed")))
    assert not moved.score_prompt
    done = only(CompleteTurn, driver.end("b", moved.attempt, 1))
    assert done.prompt_logprobs == [None, -1.0, -2.0]


def only_dispatch(commands: Sequence[FleetCommand]) -> DispatchTurn:
    (sent,) = dispatches(commands)
    return sent
