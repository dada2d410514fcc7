"""Traces and scenarios: what is wrong in them is named; and a recorded storm replays to the same
commands.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.rollout.simulated.scenario import (
    read_rollout_scenario,
    run_rollout_scenario,
    shipped_rollout_scenarios,
)
from benchmarks.rollout.simulated.sessions import read_sessions
from benchmarks.rollout.storm import Storm
from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import EVENT_TYPES, FleetCommand, FleetEvent
from slackwater.control.record import record_line, replay
from slackwater.model.errors import ConfigError
from slackwater.model.spot_trace import read_spot_trace
from slackwater.sim.rollout.extra_capacity import SpotRates


def spot_file(folder: Path, *rows: str) -> Path:
    path = folder / "spot.csv"
    path.write_text("t_s,event,instance_id\n" + "\n".join(rows) + "\n")
    return path


def test_a_spot_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    rows = read_spot_trace(spot_file(tmp_path, "60,remove,a", "0,add,a", "30,add,b"))
    assert [(row.t_s, row.event) for row in rows] == [(0, "add"), (30, "add"), (60, "remove")]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (["0,take,a"], "event"),
        (["-1,add,a"], "t_s"),
        (["0,remove,a"], "instance_id"),
        (["0,add,a", "1,add,a"], "instance_id"),
        (["0,add,a", "1,remove,a", "2,add,a"], "instance_id"),
        (["x,add,a"], "t_s"),
    ],
)
def test_a_bad_spot_trace_is_refused_by_name(tmp_path: Path, rows: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_spot_trace(spot_file(tmp_path, *rows))


def test_a_drawn_trace_has_about_the_mean_asked_for() -> None:
    events = SpotRates(6.0, removals_per_h=2.0, hours=200.0).draw(1)
    alive, area, before_s = 0, 0.0, 0.0
    for row in events:
        area += alive * (row.t_s - before_s)
        before_s = row.t_s
        alive += 1 if row.event == "add" else -1
    assert area / before_s == pytest.approx(6.0, rel=0.15)


def test_sessions_end_before_the_turn_that_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "agents.csv"
    path.write_text(
        "session,turn,prompt_tokens,output_tokens,tool_s\n"
        "a,0,100,10,1.5\na,1,900,10,0\na,2,2000,10,0\nb,0,5000,1,0\n"
    )
    (session,) = read_sessions(path, max_context_tokens=1000)
    assert [(turn.prompt_tokens, turn.pause_s) for turn in session] == [(100, 1.5), (900, 0.0)]


def test_every_shipped_scenario_reads_and_a_small_one_runs() -> None:
    shipped = shipped_rollout_scenarios()
    for name in shipped:
        assert read_rollout_scenario(name)[0].name == name
    scenario, folder = read_rollout_scenario(
        "agents", ["sessions.count=8", "engines.count=1", 'rules=["affinity"]']
    )
    results = run_rollout_scenario(scenario, folder, lambda _, __: None)
    assert results["affinity"]["seconds"] > 0


@pytest.mark.parametrize("wrong", ["modle=1", "model=9b", "kind=sport", "seconds=-1"])
def test_a_wrong_scenario_names_the_field(wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
        read_rollout_scenario("agents", [wrong])


def test_a_recorded_storm_replays_to_the_same_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    storm, lines = Storm(5), list[bytes]()
    honest = storm.controller.handle

    def recorded(event: FleetEvent) -> Sequence[FleetCommand]:
        commands = honest(event)
        lines.append(record_line(event, commands))
        return commands

    monkeypatch.setattr(storm.controller, "handle", recorded)
    storm.run(hours=0.2)
    fresh = FleetController(storm.manager.state.settings)
    agreed, divergence = replay(fresh, lines, EVENT_TYPES)
    assert divergence is None
    assert agreed == len(lines) > 500
