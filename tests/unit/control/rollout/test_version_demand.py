"""What the weight director hears of the turns that need a version."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from slackwater.control.rollout.demand import Demand
from slackwater.control.rollout.live_turn import LiveTurn
from slackwater.control.rollout.manager_state import ManagerState
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.control.weights.events import VersionNeeded
from slackwater.model.ids import JobId, TrajectoryId, TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec


def turn() -> LiveTurn:
    name = TurnId("t")
    prompt = array("I", [1])
    return LiveTurn(TurnSpec(name, TrajectoryId(name), JobId("j"), prompt, Sampling(4), "v"), 9, 0)


class Heard:
    """A demand, and the director's idea of it."""

    def __init__(self) -> None:
        self._state = ManagerState(RolloutSettings())
        self._demand = Demand(self._state)
        self._turn = turn()
        self.turns, self.reported, self.reports = 0, 0, 0

    def change(self, opens: bool) -> None:
        out = self._state.out = []
        if opens:
            self._demand.record_open(self._turn)
        else:
            self._demand.record_close(self._turn)
        self.turns += 1 if opens else -1
        for said in out:
            assert isinstance(said, VersionNeeded)
            self.reported = said.turns
            self.reports += 1


@given(st.lists(st.booleans(), max_size=300))
def test_the_last_report_is_never_far_from_the_turns(changes: list[bool]) -> None:
    heard = Heard()
    for opens in changes:
        if opens or heard.turns:
            heard.change(opens)
        assert (heard.reported == 0) == (heard.turns == 0)
        assert heard.reported / 4 <= heard.turns <= 2 * heard.reported


@given(st.integers(1, 40))
def test_turns_that_come_and_go_are_reported_once(turns: int) -> None:
    heard = Heard()
    for _ in range(2 * turns):
        heard.change(True)
    before = heard.reports
    for _ in range(50):
        for opens in (False, True):
            for _ in range(turns):
                heard.change(opens)
    assert heard.reports <= before + 2
