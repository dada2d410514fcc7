"""`slackwater plan --slacks`: what it prints, writes and refuses."""

import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from slackwater.cli.main import main

Call = Callable[..., tuple[int, str, str]]

FLEET = Path(__file__).parents[3] / "examples" / "five_slacks" / "fleet.toml"

SMALL = """
policy = "group"
[rollout]
node_type = "H20"
max_nodes = 2
[train]
node_type = "H800"
max_nodes = 1
[serving]
nodes = 1
requests_per_s = 0.05
[[jobs]]
name = "only"
rollout_s = 20
train_s = 5
iterations = 1
trajectories = 3
max_turns = 2
"""


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Call:
    """Run a command line in this process, in a folder with the small file."""
    (tmp_path / "fleet.toml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["slackwater", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return run


@pytest.mark.timeout(240)
def test_a_plan_says_what_each_kind_saves_and_is_a_configuration_that_a_service_takes(
    call: Call,
) -> None:
    command = ["plan", "--slacks", "fleet.toml", "--seeds", "1", "--json"]
    status, out, error = call(*command, "--output", "service.toml", "--plot", "chart.svg")
    assert status == 0, error
    assert "first answer: " in error
    figures = json.loads(out)
    assert figures["combinations"] == 32
    for measure in ("cost", "completed_s", "jobs_in_slo", "attainment"):
        parts = [row[measure]["mean"] for row in figures["kinds"].values()]
        whole = figures["all"][measure] - figures["none"][measure]
        assert sum(parts) == pytest.approx(whole, abs=1e-9), measure
    assert Path("chart.svg").read_text().startswith("<?xml")
    status, out, error = call("up", "--config", "service.toml", "--dry-run")
    assert status == 0, error
    resolved = tomllib.loads(out)
    assert resolved["fleet"]["nodes"]
    assert resolved["prices"]["core_per_h"] == 0.05


def test_the_input_can_be_looked_at(call: Call) -> None:
    command = ["plan", "--slacks", str(FLEET), "--set", "external.cores=3", "--dry-run", "--json"]
    status, out, _ = call(*command)
    assert status == 0
    shown = json.loads(out)
    assert shown["external"]["cores"] == 3
    assert [job["name"] for job in shown["jobs"]] == ["games", "puzzles"]
    assert "folder" not in shown


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--slacks", "fleet.toml", "--jobs", "jobs.csv"], "--jobs"),
        (["--fleet", "fleet.toml"], "--slacks FILE instead"),
        (["--slacks", "nothing.toml"], "cannot be read"),
        (["--slacks", str(FLEET), "--set", "jobs=1"], "jobs"),
        (["--slacks", str(FLEET), "--plot", "chart.txt"], "--plot"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(call: Call, options: list[str], said: str) -> None:
    status, _, error = call("plan", *options)
    assert status == 2
    assert said in error
    assert len(error.strip().splitlines()) == 1
