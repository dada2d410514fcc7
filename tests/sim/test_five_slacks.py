"""All five kinds of slack in one simulated fleet, and what each of them brings."""

from dataclasses import replace

import pytest

from benchmarks.slacks import contributions
from benchmarks.slacks.contributions import every_combination, shapley_values
from benchmarks.slacks.fleet import FiveSlacksRun, Slack
from slackwater.sim.rollout.spot_trace import SpotEvent

SPOT = (
    SpotEvent(0.0, "add", "spot0"),
    SpotEvent(0.0, "add", "spot1"),
    SpotEvent(90.0, "remove", "spot0"),
)
SMALL = replace(contributions.SMALL, spot=SPOT)
ALL, NONE = frozenset(Slack), frozenset[Slack]()


def test_all_five_kinds_are_used_at_once_and_the_jobs_end_earlier() -> None:
    alone = FiveSlacksRun(SMALL, NONE).run()
    together = FiveSlacksRun(SMALL, ALL).run(check=True)
    assert (alone.kinds_seen, together.kinds_seen) == (0, 5)
    assert together.completed_s < alone.completed_s
    assert FiveSlacksRun(SMALL, ALL).run() == together, "the same seed gives the same run"


@pytest.mark.parametrize("kind", list(Slack))
def test_each_kind_is_switched_by_itself(kind: Slack) -> None:
    plan = replace(SMALL, trajectories=6)
    result = FiveSlacksRun(plan, frozenset({kind})).run()
    counts = {
        Slack.PHASES: result.shared_turns,
        Slack.SERVING: result.borrowed_turns,
        Slack.SPOT: result.spot_turns,
        Slack.ACTIONS: result.actions,
        Slack.WEIGHTS: result.deltas,
    }
    others = [count for one, count in counts.items() if one is not kind]
    assert not any(others)


def test_contributions_add_up_to_the_whole() -> None:
    def saved(on: frozenset[Slack]) -> float:
        both = 30.0 if {Slack.SPOT, Slack.SERVING} <= on else 0.0
        return 10.0 * (Slack.PHASES in on) + both

    found = shapley_values({on: saved(on) for on in every_combination()})
    assert len(every_combination()) == 32
    assert found[Slack.PHASES] == pytest.approx(10.0)
    assert found[Slack.SPOT] == found[Slack.SERVING] == pytest.approx(15.0)
    assert found[Slack.ACTIONS] == found[Slack.WEIGHTS] == 0.0
