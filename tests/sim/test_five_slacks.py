"""All five kinds of slack in one simulated fleet, and what each of them brings."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from benchmarks.slacks.storm import SlackStorm
from harness.checked_fleet import CheckedSlackFleet
from slackwater.control.rollout.gates import TurnGate
from slackwater.model.errors import ConfigError
from slackwater.sim.slacks.contributions import (
    ALL,
    NONE,
    SlackStudy,
    all_combinations,
    contributions,
    first_combinations,
)
from slackwater.sim.slacks.fleet import FiveSlackFleet, Kinds, Slack, SlackRun
from slackwater.sim.slacks.scenario import SlackScenario, read_slack_scenario

FLEET = Path(__file__).parents[2] / "examples" / "five_slacks" / "fleet.toml"
TRACE = "t_s,event,instance_id\n0,add,a\n0,add,b\n60,remove,a\n"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SlackScenario:
    """The shipped fleet with fewer trajectories, and a spot node that vanishes in between."""
    shipped = read_slack_scenario(FLEET)
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "spot.csv").write_text(TRACE)
    return replace(
        shipped,
        folder=folder,
        spot=replace(shipped.spot, trace=Path("spot.csv")),
        jobs=tuple(replace(job, trajectories=12) for job in shipped.jobs),
        external=replace(shipped.external, cores=6),
        turns_per_device=2,
    )


@cache
def run_of(scenario: SlackScenario, on: Kinds) -> SlackRun:
    return FiveSlackFleet(scenario, on).finish()


def test_all_five_kinds_are_used_at_once_and_save_time_and_money(small: SlackScenario) -> None:
    alone, together = run_of(small, NONE), CheckedSlackFleet(small, ALL).finish()
    assert (alone.kinds, together.kinds) == (NONE, ALL)
    assert together.completed_s < alone.completed_s
    assert together.cost < alone.cost
    assert sum(alone.tokens.values()) == sum(together.tokens.values()), "the same work"
    assert run_of(small, ALL) == together, "the same seed gives the same run"


@pytest.mark.parametrize("kind", [Slack.PHASES, Slack.SPOT, Slack.ACTIONS, Slack.WEIGHTS])
def test_each_kind_is_switched_by_itself(small: SlackScenario, kind: Slack) -> None:
    assert run_of(small, frozenset({kind})).kinds == {kind}


def test_contributions_add_up_to_the_whole() -> None:
    def saved(on: Kinds) -> float:
        both = 30.0 if {Slack.SPOT, Slack.SERVING} <= on else 0.0
        return 10.0 * (Slack.PHASES in on) + both

    found = contributions({on: saved(on) for on in all_combinations()})
    assert len(all_combinations()) == 32
    assert found[Slack.PHASES] == pytest.approx(10.0)
    assert found[Slack.SPOT] == found[Slack.SERVING] == pytest.approx(15.0)
    assert found[Slack.ACTIONS] == found[Slack.WEIGHTS] == 0.0
    first = contributions({on: saved(on) for on in first_combinations()})
    assert (first[Slack.PHASES], first[Slack.SPOT]) == (10.0, 30.0), "without that kind alone"


def test_a_study_says_what_each_kind_adds_to_cost_time_and_slos(small: SlackScenario) -> None:
    study = SlackStudy(small)
    study.run([0], first_combinations(), processes=2)
    figures = study.figures()
    assert (figures["combinations"], figures["kinds_seen"]) == (7, 5)
    assert figures["all"]["cost"] < figures["none"]["cost"]
    assert figures["none"]["jobs_in_slo"] == 1.0
    assert 0.9 < figures["none"]["attainment"] <= 1.0
    assert set(figures["kinds"]) == {kind.value for kind in Slack}
    assert figures["kinds"]["weights"]["completed_s"]["mean"] < 0
    assert study.nodes_used()


@pytest.mark.parametrize(
    ("assignment", "named"),
    [
        ("model=70b", "model"),
        ("spot.mean_nodes=0", "spot: mean_nodes"),
        ("external.cores=0", "external: cores"),
        ("links.gb_per_s=-1", "links: gb_per_s"),
        ("rollout.max_nodes=1", "fits nowhere"),
        ("serving.tokens=1", "tokens"),
        ("folder=/tmp", "folder"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(assignment: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_slack_scenario(FLEET, [assignment])


def test_a_storm_with_faults_in_every_kind_breaks_no_rule_and_loses_no_iteration() -> None:
    report = SlackStorm(read_slack_scenario(FLEET), 1, 0.5).run()
    assert report.kinds == 5
    assert report.loans > 0
    assert sum(report.faults.values()) > 5


def test_a_storm_finds_a_turn_that_runs_without_a_permit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TurnGate, "admits", lambda self, spec: True)
    with pytest.raises(AssertionError, match="without a permit"):
        SlackStorm(read_slack_scenario(FLEET), 1, 0.5).run()
