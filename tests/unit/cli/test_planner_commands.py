"""`slackwater sim` and `slackwater plan`: what they print, what they write, and how they end."""

import json
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slackwater.cli.main import main
from slackwater.sim.inputs.scenario_file import load_shipped_scenarios

SMALL = """
name = "small"
compare = ["solo", "colocated"]

[fleet.rollout]
node_type = "H20"
max_nodes = 4

[fleet.train]
node_type = "H800"
max_nodes = 4

[policy]
name = "solo"

[[jobs]]
job = "a"
rollout_s = 100
train_s = 80
slo = 1.5
iterations = 5

[[jobs]]
job = "b"
arrival_s = 60
rollout_s = 200
train_s = 50
slo = 1.2
iterations = 4
"""

FLEET = """
[rollout]
node_type = "H20"
max_nodes = 4
[train]
node_type = "H800"
max_nodes = 4
"""

JOBS = "job,rollout_s,train_s,slo\na,100,80,1.5\nb,90,70,1.4\n"


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    error: str


Call = Callable[..., Ended]


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Call:
    """Run a command line in this process, in a folder with the small files."""
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "fleet.toml").write_text(FLEET)
    (tmp_path / "jobs.csv").write_text(JOBS)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["slackwater", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return Ended(int(ended.value.code or 0), shown.out, shown.err)

    return run


def refused(ended: Ended) -> str:
    """The one line of a refusal; nothing is on the other stream."""
    assert ended.status == 2
    assert ended.out == ""
    assert len(ended.error.splitlines()) == 1
    assert ended.error.startswith("slackwater: ")
    return ended.error


def changed(tmp_path: Path, old: str, new: str) -> None:
    assert old in SMALL
    (tmp_path / "small.toml").write_text(SMALL.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("max_nodes = 4", "max_nodez = 4", ["fleet.rollout.max_nodez", "did you mean max_nodes?"]),
        (
            "rollout_s = 100",
            "rollout_min = 2",
            ["jobs[0].rollout_min", "write rollout_s, in seconds"],
        ),
        ("rollout_s = 100", 'rollout_s = "2min"', ["jobs[0].rollout_s", "'2min'", "of seconds"]),
        ("rollout_s = 100", "rollout_s = -5", ["jobs[0]", "rollout_s", "-5", "above 0"]),
        ("arrival_s = 60", "arrival_s = -60", ["jobs[1]", "arrival_s", "-60", "not be negative"]),
        ("slo = 1.5", "slo = 0.9", ["jobs[0]", "slo", "0.9", "at least 1"]),
        ("iterations = 5", "iterations = 5.5", ["jobs[0].iterations", "5.5", "whole number"]),
        ("iterations = 5", "rollout_nodes = 9", ["jobs[0]", "'a' fits nowhere", "9 rollout nodes"]),
        ("iterations = 5", "train_state_gb = 9e9", ["jobs[0]", "'a' fits nowhere", "host memory"]),
        ("max_nodes = 4", "max_nodes = 0", ["rollout", "max_nodes", "0", "above 0"]),
        ('node_type = "H20"', 'node_type = "H21"', ["fleet.rollout", "'H21'", "H20, H800"]),
        ('job = "b"', 'job = "a"', ["job", "'a'", "twice"]),
        ('name = "solo"', 'name = "sola"', ["policy.name", "'sola'", "solo"]),
        ('name = "solo"', 'name = "solo"\noptions = { x = 1 }', ["x", "no option of solo"]),
        ('name = "small"', 'name = "small"\nseed = "x"', ["seed", "'x'", "whole number"]),
        ('name = "small"', "name = ", ["small.toml", "is not TOML"]),
        (
            'name = "small"',
            'name = "small"\ntrace = { jobs = "none.csv" }',
            ["trace.jobs", "'none.csv'", "profiles"],
        ),
    ],
)
def test_a_bad_scenario_ends_with_one_line_that_names_field_value_and_fix(
    call: Call, tmp_path: Path, old: str, new: str, words: list[str]
) -> None:
    changed(tmp_path, old, new)
    message = refused(call("sim", "run", "small.toml"))
    for word in words:
        assert word in message


def test_a_scenario_without_jobs_or_without_a_pool_is_refused(call: Call, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL[: SMALL.index("[[jobs]]")])
    assert "jobs: empty" in refused(call("sim", "run", "small.toml"))
    (tmp_path / "small.toml").write_text(SMALL.replace("[fleet.train]", "[fleet.other]"))
    assert "fleet.other: unknown key" in refused(call("sim", "run", "small.toml"))
    (tmp_path / "fleet.toml").write_text("")
    message = refused(call("plan", "--fleet", "fleet.toml", "--jobs", "jobs.csv"))
    assert "rollout: missing; add the table [rollout]" in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sim", "run", "quickstrat"], ["'quickstrat'", "did you mean quickstart?"]),
        (["sim", "run", "none.toml"], ["none.toml", "cannot be read"]),
        (["sim", "run", "small.toml", "--set", "seed"], ["--set", "a.b=value"]),
        (["sim", "run", "small.toml", "--set", "polcy.name=x"], ["polcy", "did you mean policy?"]),
        (["sim", "run", "small.toml", "--plot", "a.gif"], ["--plot", "a.gif", ".png"]),
        (["sim", "run", "small.toml", "--plot", "no/a.png"], ["--plot", "folder that exists"]),
        (["sim", "run", "small.toml", "--record", "no/a"], ["--record", "folder that exists"]),
        (["sim", "run", "small.toml", "--hours", "3"], ["--hours", "FROM:TO"]),
        (["sim", "run", "small.toml", "--hours", "5:3"], ["--hours", "end after its start"]),
        (["sim", "compare", "small.toml", "--policies", "solo,nix"], ["policy.name", "'nix'"]),
        (
            ["sim", "compare", "small.toml", "--set", "policy.options.nix=1"],
            ["policy.options.nix", "no option of any policy", "max_group_size"],
        ),
        (
            ["sim", "run", "drain", "--set", "fleet.train.max_nodes=1"],
            ["workload: job", "fits nowhere", "train nodes and the pool has 1", "max_nodes"],
        ),
        (["sim", "replay", "none.record"], ["RECORD", "cannot be read"]),
        (["sim", "replay", "small.toml"], ["line 1", "--record"]),
        (["sim", "run"], ["FILE"]),
    ],
)
def test_a_bad_command_line_ends_with_one_line(
    call: Call, arguments: list[str], words: list[str]
) -> None:
    message = refused(call(*arguments))
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("job,rollout_s,train_s,slo\na,100,x,1.5\n", ["jobs.csv line 2", "train_s", "'x'"]),
        ("job,rollout_s,train_s,slo\na,1,2,1.5\nb,1,2,0.5\n", ["jobs.csv line 3", "slo", "0.5"]),
        ("job,rollout_s,train_s\na,1,2\n", ["jobs.csv line 1", "slo", "missing column"]),
        ("job,rollout_s,train_s,slo,size\na,1,2,1,7\n", ["line 2", "size", "unknown column"]),
        ("job,rollout_s,train_s,slo\na,1,2,1\na,1,2,1\n", ["job", "'a'", "twice"]),
        ("job,rollout_s,train_s,slo\n", ["--jobs", "at least one job"]),
    ],
)
def test_bad_rows_of_jobs_are_named_by_line(
    call: Call, tmp_path: Path, rows: str, words: list[str]
) -> None:
    (tmp_path / "jobs.csv").write_text(rows)
    message = refused(call("plan", "--fleet", "fleet.toml", "--jobs", "jobs.csv"))
    for word in words:
        assert word in message


def test_a_job_that_fits_nowhere_is_turned_away_alone(call: Call, tmp_path: Path) -> None:
    head = "job,rollout_s,train_s,slo,rollout_nodes\n"
    (tmp_path / "jobs.csv").write_text(f"{head}a,100,50,1.5,1\nb,100,50,1.5,99\n")
    planned = call("plan", "--fleet", "fleet.toml", "--jobs", "jobs.csv", "--json")
    assert planned.status == 0, planned.error
    found = json.loads(planned.out)
    assert found["placed"] == 1
    (away,) = found["refusals"]
    assert (away["job"], away["for_good"]) == ("b", True)
    assert "99 rollout nodes" in away["reason"]
    (tmp_path / "jobs.csv").write_text(f"{head}b,100,50,1.5,99\n")
    alone = call("plan", "--fleet", "fleet.toml", "--jobs", "jobs.csv")
    assert alone.status == 1
    assert "b: fits nowhere" in alone.error


def test_a_job_of_absurd_lengths_is_left_out_with_its_reason(call: Call, tmp_path: Path) -> None:
    rows = "job,rollout_s,train_s,slo\nlong,1e300,400,2\nshort,60,0.01,2\nsound,60,40,2\n"
    (tmp_path / "jobs.csv").write_text(rows)
    planned = call("plan", "--fleet", "fleet.toml", "--jobs", "jobs.csv", "--json")
    assert planned.status == 0, planned.error
    found = json.loads(planned.out)
    assert found["placed"] == 1
    assert found["alone_price_per_h"] == pytest.approx(8 * (1.85 + 5.28))
    assert {row["job"]: row["reason"].split(",")[0] for row in found["refusals"]} == {
        "long": "its rollout_s is 1e+300",
        "short": "its train_s is 0.01",
    }


def test_a_dry_run_prints_all_settings_as_a_file_that_gives_the_same_run(
    call: Call, tmp_path: Path
) -> None:
    shown = call("sim", "run", "small.toml", "--set", "jobs.0.slo=1.9", "--seed", "3", "--dry-run")
    assert shown.status == 0
    table = tomllib.loads(shown.out)
    assert table["jobs"][0]["slo"] == 1.9
    assert table["seed"] == 3
    assert table["switching"]["cold_base_s"] > 0
    (tmp_path / "again.toml").write_text(shown.out)
    assert call("sim", "run", "again.toml", "--dry-run").out == shown.out


def test_a_run_prints_its_jobs_and_writes_picture_trace_and_record(
    call: Call, tmp_path: Path
) -> None:
    files = ["--plot", "a.svg", "--trace", "a.json", "--record", "a.record"]
    ended = call("sim", "run", "small.toml", "--json", *files)
    assert ended.status == 0
    result: dict[str, Any] = json.loads(ended.out)
    assert {row["job"] for row in result["jobs"]} == {"a", "b"}
    assert all(row["iterations_done"] == row["iterations"] for row in result["jobs"])
    assert result["slo_attainment"] == 1.0
    assert result["config"]["jobs"][1]["arrival_s"] == 60
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")
    slices = json.loads((tmp_path / "a.json").read_bytes())["traceEvents"]
    assert sum(event.get("cat") == "rollout,run" for event in slices) == 5 + 4
    again = call("sim", "replay", "a.record")
    assert again.status == 0
    assert "every command is the same" in again.out


def test_a_record_that_was_tampered_with_is_told_from_one_that_agrees(
    call: Call, tmp_path: Path
) -> None:
    assert call("sim", "run", "small.toml", "--record", "a.record").status == 0
    lines = (tmp_path / "a.record").read_text().splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if '"GrantPermit"' in line)
    lines[at] = lines[at].replace('"phase":"rollout"', '"phase":"train"')
    (tmp_path / "a.record").write_text("".join(lines))
    ended = call("sim", "replay", "a.record")
    assert ended.status == 1
    assert f"line {at + 1} " in ended.out
    (tmp_path / "a.record").write_text("".join(lines[:at]) + '{"event": {"ty')
    assert f"a.record line {at + 1}" in refused(call("sim", "replay", "a.record"))


def test_a_comparison_has_a_line_for_each_policy_with_its_cost_ratio(call: Call) -> None:
    ended = call("sim", "compare", "small.toml", "--json", "--plot", "c.pdf")
    rows = json.loads(ended.out)["policies"]
    assert [row["policy"] for row in rows] == ["solo", "colocated"]
    assert rows[0]["times_cheaper"] == 1.0
    assert rows[1]["times_cheaper"] == pytest.approx(rows[0]["cost"] / rows[1]["cost"])
    shown = call("sim", "compare", "small.toml")
    assert "colocated" in shown.out
    assert "x below" in shown.out


def test_a_plan_says_who_shares_what_and_what_that_saves(call: Call) -> None:
    ended = call(
        "plan", "--fleet", "fleet.toml", "--jobs", "jobs.csv", "--policy", "solo", "--json"
    )
    figures = json.loads(ended.out)
    assert figures["placed"] == 2
    prices = (figures["price_per_h"], figures["alone_price_per_h"])
    assert prices == pytest.approx((2 * 57.04, 2 * 57.04))
    assert [len(group["jobs"]) for group in figures["groups"]] == [1, 1]
    jobs = [job for group in figures["groups"] for job in group["jobs"]]
    assert all(job["slowdown"] == pytest.approx(1.0, abs=0.05) for job in jobs)


def test_a_plan_is_a_configuration_that_a_service_takes(call: Call) -> None:
    arguments = ["plan", "--fleet", "fleet.toml", "--jobs", "jobs.csv", "--policy", "group"]
    ended = call(*arguments, "--output", "service.toml", "--json")
    assert "first answer: 2 of 2 jobs placed" in ended.error
    figures = json.loads(ended.out)
    shown = call("up", "--config", "service.toml", "--dry-run")
    assert shown.status == 0, shown.error
    resolved = tomllib.loads(shown.out)
    assert resolved["coschedule"]["placement"] == "group"
    wanted = {
        node
        for group in figures["groups"]
        for role in ("rollout_nodes", "train_nodes")
        for node in group[role]
    }
    assert {node["name"] for node in resolved["fleet"]["nodes"]} == wanted


def test_a_plan_on_a_full_fleet_says_who_must_wait_and_why(call: Call) -> None:
    arguments = ["plan", "--fleet", "fleet.toml", "--jobs", "jobs.csv", "--policy", "solo"]
    ended = call(*arguments, "--set", "train.max_nodes=1", "--json")
    figures = json.loads(ended.out)
    refusals = figures["refusals"]
    assert len(refusals) == 1
    assert figures["placed"] == 1 and figures["times_cheaper"] == 1.0  # the other is no saving
    assert refusals[0]["reason"]
    assert refusals[0]["for_good"] is False
    shown = " ".join(call(*arguments, "--set", "train.max_nodes=1").out.split())
    assert "1 of 2 jobs placed, 1 must wait" in shown
    assert "the 1 placed jobs alone" in shown and "the others count on neither side" in shown
    assert "must wait: " in shown and "by: isolate, nodes of its own" in shown


def test_every_shipped_scenario_is_listed_and_resolves(call: Call) -> None:
    shown = call("sim", "list", "--json")
    assert json.loads(shown.out).keys() == load_shipped_scenarios().keys()
    for name, file in load_shipped_scenarios().items():
        assert name == file.name
        assert file.description
        file.scenario(Path())


def test_shipped_scenarios_are_those_that_the_benches_run() -> None:
    from benchmarks.coscheduling.cluster import production
    from benchmarks.coscheduling.drain import backlog
    from benchmarks.coscheduling.philly import CELLS
    from slackwater.sim.cluster.workload import ProfileWorkload

    shipped = {name: file.scenario(Path()) for name, file in load_shipped_scenarios().items()}
    assert shipped["production"] == production(seed=0, quick=False)
    assert shipped["drain"] == backlog(seed=0, quick=False)
    assert shipped["philly"].workload == ProfileWorkload()
    assert shipped["philly"].policy.options == {"max_group_size": CELLS[0].group_size}


@pytest.mark.process
def test_the_planner_runs_with_no_more_than_its_own_requirements(tmp_path: Path) -> None:
    extras = (
        "torch",
        "transformers",
        "fastapi",
        "uvicorn",
        "sqlalchemy",
        "httpx",
        "tinker",
        "ortools",
    )
    (tmp_path / "fleet.toml").write_text(FLEET)
    (tmp_path / "jobs.csv").write_text(JOBS)
    arguments = [
        "slackwater",
        "plan",
        "--fleet",
        "fleet.toml",
        "--jobs",
        "jobs.csv",
        "--plot",
        "p.png",
    ]
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({extras!r})); sys.argv = {arguments!r}\n"
        "from slackwater.cli.main import main; main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "2 of 2 jobs placed" in ended.stdout
    assert (tmp_path / "p.png").stat().st_size > 10_000


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """A suite that a shell runs in the background ignores Ctrl-C, and so would every program that
    it starts.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.process
@pytest.mark.usefixtures("hears_ctrl_c")
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_under_the_final_names(
    tmp_path: Path, kind: signal.Signals
) -> None:
    names = ["a.record", "a.png", "a.json"]
    arguments = ["--record", names[0], "--plot", names[1], "--trace", names[2], "--json"]
    running = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "slackwater",
            "sim",
            "run",
            "production",
            "--policy",
            "solo",
            *arguments,
        ],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 240
    while not any(path.stat().st_size for path in tmp_path.glob(".a.record.*.part")):
        assert running.poll() is None
        assert time.monotonic() < deadline, "the run never began to record"
        time.sleep(0.05)
    running.send_signal(kind)
    out, error = running.communicate(timeout=240)
    assert running.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[kind]
    assert out == ""
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []
