"""Limits: every one ends the action, says so, and leaves nothing; the next action runs."""

import pytest
from sandbox_stage import Stage, wait_until_gone

from harness.sleep_markers import sleep_marker
from slackwater.model.errors import ConfigError
from slackwater.sandbox.limits import Limits
from slackwater.sandbox.reports import End


@pytest.fixture(autouse=True)
def _the_next_action_runs(stage: Stage) -> "object":
    yield
    assert stage.sh("echo fine").stdout == "fine\n"


def test_a_sleeper_ends_at_its_limit_with_everything_that_it_started(stage: Stage) -> None:
    sleep = f"sleep {sleep_marker()}"
    script = f"{sleep} & setsid {sleep} & (setsid {sleep} &) ; {sleep}"
    ran = stage.sh(script, wall_s=0.5)
    assert (ran.over.end, ran.over.reason) == (End.WALL, "it ran longer than 0.5 s")
    assert wait_until_gone(sleep) == []


def test_what_an_action_left_behind_goes_when_it_ends(stage: Stage) -> None:
    sleep = f"sleep {sleep_marker()}"
    ran = stage.sh(f"setsid {sleep} & (setsid {sleep} &) ; echo ended")
    assert (ran.over.end, ran.stdout) == (End.EXITED, "ended\n")
    assert wait_until_gone(sleep) == []


def test_a_process_that_hides_its_variables_goes_too(stage: Stage) -> None:
    sleep = f"sleep {sleep_marker()}"
    ran = stage.sh(f"env -i setsid sh -c '{sleep}; :' & sleep 0.2")
    assert ran.over.end is End.EXITED
    assert wait_until_gone(sleep) == []


def test_a_stopped_action_says_why(stage: Stage) -> None:
    number = sleep_marker()
    action = stage.start("sleep", str(number))
    stage.supervisor.step(0.2)
    stage.supervisor.stop(action, "nobody wants it")
    ran = stage.until_over(action)
    assert (ran.over.end, ran.over.reason) == (End.STOPPED, "nobody wants it")
    assert wait_until_gone(f"sleep {number}") == []


def test_a_flood_of_output_is_cut_at_the_limit(stage: Stage) -> None:
    ran = stage.sh("yes", output_bytes=50_000)
    assert ran.over.end is End.OUTPUT
    assert len(ran.stdout) == 50_000


def test_a_fork_bomb_stays_within_its_processes(stage: Stage) -> None:
    sleep = f"time.sleep({sleep_marker()})"
    bomb = (
        "import os, time\n"
        "children = 0\n"
        "try:\n"
        "    while children < 200:\n"
        "        if os.fork() == 0:\n"
        f"            {sleep}\n"
        "        children += 1\n"
        "except OSError:\n"
        "    pass\n"
        "print(children)\n"
    )
    ran = stage.run("/usr/bin/env", "python3", "-c", bomb, processes=16)
    assert 0 < int(ran.stdout) < 16
    assert wait_until_gone(sleep) == []


def test_memory_beyond_the_limit_ends_the_action(stage: Stage) -> None:
    hungry = "x = bytearray(600 << 20); print(len(x))"
    ran = stage.run("/usr/bin/env", "python3", "-c", hungry, memory_bytes=200 << 20)
    assert ran.over.status != 0
    assert ran.stdout == ""
    assert ran.over.end is End.MEMORY or "MemoryError" in ran.stderr


def test_a_disk_filler_is_stopped(stage: Stage) -> None:
    filler = "i=0; while :; do i=$((i+1)); head -c 500000 /dev/zero > fill$i || exit 1; done"
    ran = stage.sh(filler, disk_bytes=10 << 20)
    assert ran.over.end is End.DISK
    stage.sh("rm -f fill*")


def test_one_file_never_grows_beyond_the_limit_at_all(stage: Stage) -> None:
    ran = stage.sh("head -c 50000000 /dev/zero > big; stat -c %s big; rm big", disk_bytes=1 << 20)
    assert int(ran.stdout) <= 1 << 20


def test_a_program_that_is_not_there_is_no_crash(stage: Stage) -> None:
    ran = stage.run("no-such-program")
    assert ran.over.status != 0
    assert "no-such-program" in ran.over.reason + ran.stderr


def test_processor_time_is_counted(stage: Stage) -> None:
    ran = stage.run("/usr/bin/env", "python3", "-c", "sum(range(10**7))")
    assert ran.over.usage.cpu_s > 0 or not stage.platform.fences.enforces_cores


@pytest.mark.parametrize(
    "name", ["wall_s", "output_bytes", "memory_bytes", "processes", "disk_bytes"]
)
def test_a_limit_of_nothing_is_refused(stage: Stage, name: str) -> None:
    with pytest.raises(ConfigError, match=f"limits.{name}: 0 must be above 0"):
        Limits(**{name: 0})  # type: ignore[arg-type]


def test_an_action_gives_way_to_everybody_else(stage: Stage) -> None:
    """It is told so while it runs already."""
    script = 'until [ "$(nice) $(cut -d" " -f41 /proc/self/stat)" = "10 3" ]; do :; done; echo yes'
    assert stage.sh(script).stdout == "yes\n"
