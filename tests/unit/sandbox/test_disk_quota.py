"""The disk limit counts what an environment takes, also where no name leads to it."""

import functools
from collections.abc import Callable

import pytest
from sandbox_stage import Stage, a_stage, bubblewrap_missing, run_without_root

from slackwater.sandbox.choice import BackendName
from slackwater.sandbox.reports import End

MIB = 1 << 20
# Each writes more than the limit and then waits to be ended.
OPEN = """
import os, time
for number in range(40):
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    os.unlink("f")
    os.write(fd, os.urandom(1 << 20))
time.sleep(100)
"""
MAPPED = """
import mmap, os, time
kept = []
for number in range(40):
    fd = os.open("f", os.O_RDWR | os.O_CREAT)
    os.unlink("f")
    os.write(fd, os.urandom(1 << 20))
    kept.append(mmap.mmap(fd, 1 << 20))
    os.close(fd)
time.sleep(100)
"""
TEMPORARY = """
import os, tempfile, time
kept = []
for number in range(40):
    kept.append(tempfile.TemporaryFile())
    kept[-1].write(os.urandom(1 << 20))
    kept[-1].flush()
if os.fork() == 0:
    os.setsid()
time.sleep(100)
"""
DEEP = """
import os, time
for number in range(800):
    os.mkdir("d")
    os.chdir("d")
for number in range(40):  # each file below the limit on one
    with open(f"f{number}", "wb") as file:
        file.write(os.urandom(1 << 20))
time.sleep(100)
"""
EVASIONS = {"open": OPEN, "mapped": MAPPED, "temporary": TEMPORARY, "deep": DEEP}


def check_is_ended(stage: Stage, script: str) -> None:
    stage.supervisor.open("e")
    ran = stage.run("/usr/bin/env", "python3", "-c", script, disk_bytes=20 * MIB)
    assert ran.over.end is End.DISK, ran
    stage.supervisor.open("next")
    assert stage.sh("echo fine", environment="next").stdout == "fine\n"


def on_a_stage(check: Callable[[Stage], None], backend: BackendName) -> None:
    with a_stage(backend) as stage:
        check(stage)


@pytest.mark.parametrize("evasion", EVASIONS)
@pytest.mark.parametrize("user", ["as it is", "not root"])
def test_deleted_and_deep_files_count(evasion: str, user: str) -> None:
    check = functools.partial(check_is_ended, script=EVASIONS[evasion])
    case = functools.partial(on_a_stage, check, "process")
    if user == "not root":
        run_without_root(case)
    else:
        case()


@pytest.mark.parametrize("user", ["as it is", "not root"])
def test_deleted_files_count_inside_of_bubblewrap(user: str) -> None:
    if (why := bubblewrap_missing()) is not None:
        pytest.skip(f"this machine has no working bubblewrap: {why}")
    check = functools.partial(check_is_ended, script=OPEN)
    case = functools.partial(on_a_stage, check, "bubblewrap")
    if user == "not root":
        run_without_root(case)
    else:
        case()


def test_a_deleted_file_counts_on_top_of_a_snapshot() -> None:
    with a_stage("process") as stage:
        stage.supervisor.open("first", files={"f": b"1"})
        assert stage.sh("true", environment="first").over.status == 0
        assert stage.snapshot("first", "kept") is None
        stage.supervisor.open("e", snapshot="kept")
        ran = stage.run("/usr/bin/env", "python3", "-c", OPEN, disk_bytes=20 * MIB)
        assert ran.over.end is End.DISK, ran


def check_short_actions(stage: Stage) -> None:
    """Each is over before anybody looks, so what they leave together is what counts."""
    stage.supervisor.open("e")
    for number in range(200):
        ran = stage.sh(f"head -c 2000000 /dev/zero > f{number}", disk_bytes=20 * MIB)
        if ran.over.end is not End.EXITED:
            break
        stage.supervisor.step(0.02)
    else:
        raise AssertionError("nobody looked")
    assert ran.over.end in (End.NOT_STARTED, End.DISK)
    stage.step_until(lambda: not stage.supervisor._environments.find("e").disk.stale)
    ran = stage.sh("true", disk_bytes=20 * MIB)
    assert ran.over.end is End.NOT_STARTED
    assert "more than 20971520 bytes of files" in ran.over.reason
    assert stage.sh("rm -f f*", disk_bytes=1 << 30).over.status == 0
    assert stage.sh("echo fine", disk_bytes=20 * MIB).stdout == "fine\n"


@pytest.mark.parametrize("user", ["as it is", "not root"])
def test_short_actions_cannot_fill_the_disk_together(user: str) -> None:
    case = functools.partial(on_a_stage, check_short_actions, "process")
    if user == "not root":
        run_without_root(case)
    else:
        case()


def test_a_neighbours_deleted_files_do_not_count() -> None:
    with a_stage("process") as stage:
        stage.supervisor.open("e")
        stage.supervisor.open("neighbour")
        big = stage.start(
            "/usr/bin/env", "python3", "-c", OPEN, environment="neighbour", disk_bytes=1 << 30
        )
        ran = stage.sh("sleep 1.5; echo fine", disk_bytes=20 * MIB)
        assert (ran.over.end, ran.stdout) == (End.EXITED, "fine\n")
        stage.supervisor.stop(big, "seen")
        stage.until_over(big)


def test_a_snapshot_above_what_its_tenant_may_still_keep_is_refused() -> None:
    with a_stage("process") as stage:
        stage.supervisor.open("first", files={"f": bytes(2 * MIB)})
        assert stage.sh("true", environment="first").over.status == 0
        refused = stage.snapshot("first", "large", MIB)
        assert refused is not None and f"more than {MIB} disk bytes" in refused
        assert stage.snapshot("first", "large", 4 * MIB) is None
