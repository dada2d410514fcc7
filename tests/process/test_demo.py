"""`make run` in small: two jobs share a fleet, an instance comes and goes, and a table says what it
cost.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slackwater.runtime.store.state_directory import StateDirectory

from .service_process import gone, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

LARGE, SMALL = 'model = "compact"', 'model = "tiny"'
JOBS = Path(__file__).parents[2] / "examples" / "two_jobs"
SHORT = """[options.grpo]
groups = 2
max_groups = 2
group_size = 8
train_on = 2
updates = 1

[options.warm_up]
steps = 2
"""


def test_the_demo_runs_two_jobs_to_their_end_and_says_what_sharing_cost(
    tiny_model: Path, tmp_path: Path
) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    for file in JOBS.glob("*.toml"):  # the example's own, of a smaller model and shorter steps
        example, table, _ = file.read_text().partition("[options.grpo]")
        assert LARGE in example and table
        (jobs / file.name).write_text(example.replace(LARGE, SMALL) + SHORT)
    command = [sys.executable, "-m", "slackwater", "demo", str(jobs), "--json"]
    command += ["--run", str(tmp_path / "run"), "--models", str(tiny_model.parent)]
    command += ["--iterations", "3", "--alone", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert [row["job"] for row in found["jobs"]] == ["down", "up"]
    for row in found["jobs"]:
        assert row["stage"] == "finished" and row["bound"] >= 1
        assert row["slowdown"] == row["shared_s"] / row["alone_s"]
        for parts in row["time"].values():  # None of so few iterations that there is nothing to say
            assert parts is None or sum(parts.values()) == pytest.approx(1.0, abs=1e-3)
    assert found["instance"]["came"]
    for pool in found["pools"].values():
        assert pool["used_together"] >= 0
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == found


COMMAND = """
import pathlib, sys
from slackwater.cli.own_service import start_service
with start_service(pathlib.Path(sys.argv[1]), "--engines=0", "--trainers=0", "--sandboxes=1"):
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_service_that_a_command_started_for_itself_ends_when_the_command_is_killed(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "ready\n"
        service = StateDirectory(tmp_path).read_server()
        assert service is not None and not gone(service["pid"])
        command.kill()
    wait_for("the service's end", lambda: gone(service["pid"]))
