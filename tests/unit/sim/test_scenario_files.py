"""A scenario file takes its arrivals and response lengths from traces that stand beside it."""

from pathlib import Path

import numpy as np
import pytest

from slackwater.model.errors import ConfigError
from slackwater.model.node import H20, Role
from slackwater.sim.cluster.lengths import draw_shares
from slackwater.sim.cluster.simulate import scenario_jobs, simulate
from slackwater.sim.cluster.workload import ProfileWorkload
from slackwater.sim.inputs.scenario_file import read_fleet, read_scenario

FILE = """
name = "traced"
[trace]
jobs = "arrivals.csv"
lengths = "requests.csv"
limit_tokens = 1000
[workload]
kind = "profiles"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "traced.toml").write_text(FILE)
    (tmp_path / "arrivals.csv").write_text("arrival_s,duration_s,gpus\n50,7200,8\n950,36000,8\n")
    tokens = "".join(f"{i},{n}\n" for i, n in enumerate([100, 200, 300, 400, 5000] * 40))
    (tmp_path / "requests.csv").write_text(f"t_s,output_tokens\n{tokens}")
    return tmp_path


def test_jobs_arrive_and_last_as_in_the_trace(folder: Path) -> None:
    written, place = read_scenario(str(folder / "traced.toml"))
    jobs = scenario_jobs(written.scenario(place))
    assert [spec.arrival_s for spec in jobs] == [0, 900]
    lasting_s = [spec.iterations * spec.profile.solo_s for spec in jobs]
    assert lasting_s == pytest.approx([7200, 36000], rel=0.1)


def test_responses_are_as_long_as_in_the_trace_and_cut_at_the_limit(folder: Path) -> None:
    written, place = read_scenario(str(folder / "traced.toml"))
    scenario = written.scenario(place)
    assert scenario.lengths.kind == "quantiles"
    assert max(scenario.lengths.quantiles) == 1.0
    spec = scenario_jobs(scenario)[0]
    shares = draw_shares(spec, 0, scenario)
    # A fifth of the responses reaches the limit of 1000; the others take 100 to 400.
    assert np.mean(shares.train) == pytest.approx(0.2 + 0.8 * 0.25, rel=0.1)


def test_a_trace_can_be_named_on_the_command_line_for_a_shipped_scenario(folder: Path) -> None:
    written, place = read_scenario("philly", [f"trace.jobs={folder / 'arrivals.csv'}"])
    workload = written.scenario(place).workload
    assert isinstance(workload, ProfileWorkload)
    assert workload.arrivals == ((0.0, 7200.0), (900.0, 36000.0))
    assert workload.jobs == 2


def test_only_the_first_jobs_are_taken_when_asked(folder: Path) -> None:
    written, place = read_scenario(str(folder / "traced.toml"), ["trace.limit=1"])
    assert len(scenario_jobs(written.scenario(place))) == 1


def test_a_bad_row_of_a_trace_is_named_through_the_scenario(folder: Path) -> None:
    (folder / "arrivals.csv").write_text("arrival_s,duration_s\n0,1\n5,never\n")
    written, place = read_scenario(str(folder / "traced.toml"))
    with pytest.raises(ConfigError, match=r"arrivals\.csv line 3: duration_s: 'never'"):
        written.scenario(place)


def test_a_fleet_stands_alone_or_inside_a_scenario(tmp_path: Path) -> None:
    alone = '[rollout]\nnode_type = "H20"\nmax_nodes = 3\n[train]\nnode_type = "H800"\n'
    (tmp_path / "fleet.toml").write_text(alone)
    (tmp_path / "inside.toml").write_text(
        alone.replace("[rollout]", "[fleet.rollout]").replace("[train]", "[fleet.train]")
    )
    fleet = read_fleet(tmp_path / "fleet.toml")
    assert fleet == read_fleet(tmp_path / "inside.toml")
    rollout = fleet.pools()[0]
    assert (rollout.role, rollout.node_type, rollout.max_nodes) == (Role.ROLLOUT, H20, 3)


def test_a_node_is_never_counted_as_busier_than_it_can_be_when_tails_run_beside_others() -> None:
    few = [f"jobs.{number}.iterations=20" for number in range(4)]
    written, place = read_scenario("long_tail", ["policy.name=group", *few])
    report = simulate(written.scenario(place))
    assert report.tail_migrations > 10
    assert 0 <= report.rollout.bubble_share < 0.2
