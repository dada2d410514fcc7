"""Frames of the same attempts take a short way; nothing may come of it but speed."""

from array import array
from collections.abc import Callable

from fleet_driver import FleetDriver, turn_spec
from hypothesis import example, given
from hypothesis import strategies as st

from slackwater.control.rollout.commands import (
    AppendTokens,
    CompleteTurn,
    DispatchTurn,
    FailTurn,
    StreamTokens,
)
from slackwater.control.rollout.events import (
    InstanceLost,
    TokensArrived,
    TurnCancelled,
    TurnEnded,
    TurnSubmitted,
)
from slackwater.control.rollout.frame_buffer import MOST_FRAMES
from slackwater.model.ids import InstanceId, TurnId
from slackwater.model.turn import AttemptId, FinishReason


def frame(
    driver: FleetDriver, attempts: list[int], token: int, instance: str = "a"
) -> list[object]:
    columns = [token] * len(attempts), [-0.5] * len(attempts)
    return list(driver.happen(TokensArrived(0.0, InstanceId(instance), list(attempts), *columns)))


def running(driver: FleetDriver, count: int, *, limit: int = 10) -> list[int]:
    driver.join("a", max_running=count)
    made: list[int] = []
    for number in range(count):
        commands = driver.submit(f"t{number}", max_tokens=limit)
        made += [command.attempt for command in commands if isinstance(command, DispatchTurn)]
    return made


def tokens_of(driver: FleetDriver, name: str) -> list[int]:
    return list(driver.manager.state.turns[TurnId(name)].tokens)


def test_equal_frames_are_all_kept() -> None:
    driver = FleetDriver()
    attempts = running(driver, 3)
    for token in range(5):
        frame(driver, attempts, token)
    assert [tokens_of(driver, f"t{n}") for n in range(3)] == [[0, 1, 2, 3, 4]] * 3
    assert driver.manager.gauges()["accepted_tokens"] == 15


def test_no_token_is_lost_or_moved_however_many_frames_wait_to_be_dealt_out() -> None:
    for frames in (MOST_FRAMES - 1, MOST_FRAMES, MOST_FRAMES + 1, 3 * MOST_FRAMES + 7):
        driver = FleetDriver()
        attempts = running(driver, 3, limit=1000)
        for position in range(frames):
            tokens = array("I", (3 * position + number for number in range(3)))
            scores = array("f", (-float(token) for token in tokens))
            columns = (array("I", attempts), tokens, scores)
            driver.manager.handle(TokensArrived(0.0, InstanceId("a"), *columns))
        for number in range(3):
            wanted = [3 * position + number for position in range(frames)]
            turn = driver.manager.state.turns[TurnId(f"t{number}")]
            assert list(turn.tokens) == wanted
            assert list(turn.logprobs) == [-token for token in wanted]
        driver.manager.check_integrity()


def test_a_moved_turn_takes_along_what_its_frames_still_kept() -> None:
    driver = FleetDriver()
    attempts = running(driver, 2)
    driver.join("b")
    for token in range(4):
        columns = (list(attempts), [token] * 2, [-0.5] * 2)
        driver.manager.handle(TokensArrived(0.0, InstanceId("a"), *columns))
    moved = driver.happen(InstanceLost(0.0, InstanceId("a"), "killed"))
    sent = [command for command in moved if isinstance(command, DispatchTurn)]
    assert [list(command.generated) for command in sent] == [[0, 1, 2, 3]] * 2


def test_a_frame_beyond_the_budget_is_a_fault_also_on_the_short_way() -> None:
    driver = FleetDriver()
    attempts = running(driver, 2, limit=3)
    for token in range(3):
        frame(driver, attempts, token)
    frame(driver, attempts, 9)
    assert driver.manager.gauges()["faults"] == 2
    assert all(9 not in tokens_of(driver, name) for name in ("t0", "t1"))


def test_a_turn_that_left_keeps_nothing_of_later_frames() -> None:
    driver = FleetDriver()
    attempts = running(driver, 2)
    frame(driver, attempts, 1)
    frame(driver, attempts, 2)
    left = driver.manager.state.turns[TurnId("t0")]
    driver.happen(TurnCancelled(0.0, TurnId("t0")))
    frame(driver, attempts, 3)
    assert list(left.tokens) == [1, 2]
    assert tokens_of(driver, "t1") == [1, 2, 3]
    assert driver.manager.gauges()["late_tokens"] == 1


def test_a_frame_of_an_instance_that_is_gone_is_late() -> None:
    driver = FleetDriver()
    attempts = running(driver, 1)
    frame(driver, attempts, 1)
    driver.happen(InstanceLost(0.0, InstanceId("a"), "killed"))
    frame(driver, attempts, 2)
    assert tokens_of(driver, "t0") == [1]


def test_a_token_on_the_short_way_is_progress_after_a_loss() -> None:
    driver = FleetDriver()
    running(driver, 2)
    driver.join("b")
    moved = driver.happen(InstanceLost(0.0, InstanceId("a"), "killed"))
    turns = list(driver.manager.state.turns.values())
    assert [turn.losses_without_progress for turn in turns] == [1, 1]
    attempts = [command.attempt for command in moved if isinstance(command, DispatchTurn)]
    columns = ([1] * 2, [-0.5] * 2)
    driver.manager.handle(TokensArrived(0.0, InstanceId("b"), attempts, *columns))
    assert all(turn.buffer is not None for turn in turns)  # the frame is still buffered
    assert [turn.losses_without_progress for turn in turns] == [0, 0]


def test_an_attempt_twice_in_a_frame_counts_twice_against_its_budget() -> None:
    driver = FleetDriver()
    (attempt,) = running(driver, 1, limit=3)
    frame(driver, [attempt, attempt], 1)
    frame(driver, [attempt, attempt], 2)
    assert driver.manager.gauges()["faults"] == 1


@given(st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=30))
def test_any_sequence_of_batches_gives_each_turn_its_own_tokens(batches: list[set[int]]) -> None:
    driver = FleetDriver()
    attempts = running(driver, 5, limit=100)
    wanted: dict[int, list[int]] = {number: [] for number in range(5)}
    for token, batch in enumerate(batches):
        frame(driver, [attempts[number] for number in sorted(batch)], token)
        for number in batch:
            wanted[number].append(token)
    for number, tokens in wanted.items():
        assert tokens_of(driver, f"t{number}") == tokens
        ended = driver.end("a", attempts[number], len(tokens), reason=FinishReason.STOP)
        (complete,) = [c for c in ended if isinstance(c, (CompleteTurn, FailTurn))]
        assert isinstance(complete, CompleteTurn)
        assert list(complete.tokens) == tokens


def test_the_end_of_a_turn_leaves_the_tokens_of_the_turns_beside_it_buffered() -> None:
    driver = FleetDriver()
    attempts = running(driver, 3)
    for token in range(4):
        columns = (list(attempts), [token, 10 + token, 20 + token], [-0.5] * 3)
        driver.manager.handle(TokensArrived(0.0, InstanceId("a"), *columns))
    beside = [driver.manager.state.turns[TurnId(name)] for name in ("t0", "t2")]
    ended = TurnEnded(0.0, InstanceId("a"), AttemptId(attempts[1]), FinishReason.STOP, 4, "v1")
    (complete,) = [c for c in driver.manager.handle(ended) if isinstance(c, CompleteTurn)]
    assert list(complete.tokens) == [10, 11, 12, 13]
    assert all(turn.buffer is not None for turn in beside)
    frame(driver, [attempts[0], attempts[2]], 9)
    assert [list(turn.tokens) for turn in beside] == [[0, 1, 2, 3, 9], [20, 21, 22, 23, 9]]


class Batch:
    """An engine's batch, and what each of its turns must have got.

    No integrity check before the end: it reads all tokens, so that nothing stays buffered.
    """

    def __init__(self) -> None:
        driver = FleetDriver()
        driver.join("a", max_running=100)
        self.driver, self.manager = driver, driver.manager
        self.live: dict[int, list[int]] = {}  # tokens by attempt, in the order of the batch
        self.names: dict[int, str] = {}
        self.limits: dict[int, int] = {}
        self.streamed: dict[str, list[int]] = {}
        self.paused: set[int] = set()
        self.next_token = 0

    def start(self, limit: int, *, stream: bool = False) -> None:
        name = f"t{len(self.names)}"
        spec = turn_spec(name, max_tokens=limit, stream=stream)
        commands = self.manager.handle(TurnSubmitted(0.0, spec))
        (sent,) = [command for command in commands if isinstance(command, DispatchTurn)]
        self.live[sent.attempt], self.limits[sent.attempt] = [], limit
        self.names[sent.attempt] = name
        if stream:
            self.streamed[name] = []

    def start_stream(self, limit: int) -> None:
        self.start(limit, stream=True)

    def frames(self, number: int) -> None:
        for _ in range(number):
            batch = [
                attempt
                for attempt, tokens in self.live.items()
                if len(tokens) < self.limits[attempt] and attempt not in self.paused
            ]
            if batch:
                self._frame(batch)

    def _frame(self, batch: list[int]) -> None:
        tokens = [self.next_token + row for row in range(len(batch))]
        self.next_token += len(batch)
        for attempt, token in zip(batch, tokens, strict=True):
            self.live[attempt].append(token)
        columns = list(batch), tokens, [-0.5] * len(batch)
        for said in self.manager.handle(TokensArrived(0.0, InstanceId("a"), *columns)):
            if isinstance(said, AppendTokens):
                self.streamed[said.turn] += said.tokens
            elif isinstance(said, StreamTokens):
                for turn, token in zip(said.turns, said.tokens, strict=True):
                    self.streamed[turn].append(token)

    def read(self, number: int) -> None:
        if attempt := self._choose(number):
            assert tokens_of(self.driver, self.names[attempt]) == self.live[attempt]

    def pause(self, number: int) -> None:
        """Let a turn's row be missing in the next frames, or not any more."""
        if attempt := self._choose(number):
            self.paused ^= {attempt}

    def cancel(self, number: int) -> None:
        if attempt := self._choose(number):
            self.manager.handle(TurnCancelled(0.0, TurnId(self.names[attempt])))
            del self.live[attempt]

    def end(self, number: int) -> None:
        if attempt := self._choose(number):
            wanted = self.live.pop(attempt)
            how = AttemptId(attempt), FinishReason.STOP, len(wanted), "v1"
            said = self.manager.handle(TurnEnded(0.0, InstanceId("a"), *how))
            (complete,) = [command for command in said if isinstance(command, CompleteTurn)]
            assert (list(complete.tokens), len(complete.logprobs)) == (wanted, len(wanted))

    def _choose(self, number: int) -> int:
        return list(self.live)[number % len(self.live)] if self.live else 0

    def check(self) -> None:
        self.manager.check_integrity()
        for attempt, wanted in self.live.items():
            name = self.names[attempt]
            assert tokens_of(self.driver, name) == wanted
            assert self.streamed.get(name, wanted) == wanted
        gauges = self.manager.gauges()
        assert (gauges["faults"], gauges["late_tokens"]) == (0, 0)


STEPS = st.one_of(
    st.tuples(st.just(Batch.frames), st.integers(1, MOST_FRAMES + 2)),
    st.tuples(st.sampled_from([Batch.start, Batch.start_stream]), st.integers(3, 200)),
    st.tuples(
        st.sampled_from([Batch.end, Batch.cancel, Batch.read, Batch.pause]), st.integers(0, 5)
    ),
)


TWO = [(Batch.start, 50), (Batch.start, 50), (Batch.frames, 2)]


@example([*TWO, (Batch.end, 0), (Batch.frames, 2)])
@example([*TWO, (Batch.end, 0), (Batch.start, 50), (Batch.frames, 2), (Batch.end, 0)])
@example([*TWO, (Batch.pause, 0), (Batch.frames, 2), (Batch.pause, 0), (Batch.frames, 2)])
@given(st.lists(STEPS, max_size=40))
def test_turns_that_come_and_go_get_their_own_tokens_and_no_others(
    steps: list[tuple[Callable[[Batch, int], None], int]],
) -> None:
    batch = Batch()
    for step, number in steps:
        step(batch, number)
    batch.check()


def test_tokens_that_came_several_at_once_count_towards_the_budget() -> None:
    driver = FleetDriver()
    (attempt,) = running(driver, 1, limit=5)
    frame(driver, [attempt], 1)
    driver.tokens("a", attempt, [2, 3, 4])
    frame(driver, [attempt], 5)
    frame(driver, [attempt], 6)
    assert driver.manager.gauges()["faults"] == 1
