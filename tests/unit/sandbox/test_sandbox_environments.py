"""Environments: what an action sees, what survives, how a snapshot begins another."""

import os
import select
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest
from sandbox_stage import Stage, a_stage, bubblewrap_missing, processes_with, wait_until_gone

from slackwater.model.errors import ConfigError, NotFoundError, RefusedError
from slackwater.sandbox import process_tree
from slackwater.sandbox.choice import BackendName
from slackwater.sandbox.reports import End


def test_an_action_runs_in_its_environments_folder_and_gets_its_input(stage: Stage) -> None:
    ran = stage.sh("cat > kept; wc -c < kept; echo err >&2; exit 3", stdin=b"x" * 200_000)
    assert (ran.over.end, ran.over.status) == (End.EXITED, 3)
    assert ran.stdout.strip() == "200000"
    assert ran.stderr == "err\n"


def test_files_survive_between_actions_and_stay_with_their_environment(stage: Stage) -> None:
    stage.sh("echo one > note; echo two > $TMPDIR/other")
    assert stage.sh("cat note $TMPDIR/other").stdout == "one\ntwo\n"
    stage.supervisor.open("neighbour")
    assert stage.sh("ls", environment="neighbour").stdout == ""
    stage.supervisor.close_environment("neighbour")


def test_who_made_an_environment_and_ended_is_not_left_to_lie(stage: Stage) -> None:
    for name in ("one", "two", "three"):
        stage.supervisor.open(name)
        assert stage.sh("true", environment=name).over.end is End.EXITED
        stage.supervisor.close_environment(name)
    deadline_s = time.monotonic() + 60.0
    while any(map(has_ended, process_tree.children(os.getpid()))):
        assert time.monotonic() < deadline_s
        stage.sh("true")
        stage.supervisor.step(0.0)  # who has ended is looked for after an action


def has_ended(pid: int) -> bool:
    """Whether the process waits for its parent to ask how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return False


def test_files_of_the_owner_are_there_and_can_be_changed(stage: Stage) -> None:
    stage.supervisor.open("given", files={"src/main.txt": b"hello", "top": b"1"})
    ran = stage.sh(
        "echo more >> src/main.txt; mkdir src/new; cat src/main.txt", environment="given"
    )
    assert ran.stdout == "hellomore\n"
    stage.supervisor.close_environment("given")


@pytest.mark.parametrize("name", ["../out", "/etc/x", "a/../../b", ""])
def test_a_file_outside_the_environment_is_refused(stage: Stage, name: str) -> None:
    with pytest.raises(ConfigError, match="inside the environment"):
        stage.supervisor.open("bad", files={name: b""})
    assert "bad" not in stage.supervisor.environments()


def test_a_snapshot_begins_an_environment_that_changes_by_itself(stage: Stage) -> None:
    supervisor = stage.supervisor
    supervisor.open("first")
    stage.sh(
        "mkdir d; echo base > d/file; ln -s d/file link; chmod 755 d/file", environment="first"
    )
    assert stage.snapshot("first", "prepared") is None
    supervisor.open("second", snapshot="prepared")
    supervisor.open("third", snapshot="prepared")
    ran = stage.sh("echo more >> d/file; rm link; ls; cat d/file", environment="second")
    assert ran.stdout == "d\nbase\nmore\n"
    assert (
        stage.sh("cat link; test -x d/file && echo yes", environment="third").stdout
        == "base\nyes\n"
    )
    assert stage.sh("cat d/file", environment="first").stdout == "base\n"
    with pytest.raises(RefusedError, match="exists already"):
        supervisor.snapshot("second", "prepared")
    for name in ("first", "second", "third"):
        supervisor.close_environment(name)


def test_what_is_not_there_is_named(stage: Stage) -> None:
    with pytest.raises(NotFoundError, match="'nowhere' is not on this node"):
        stage.supervisor.open("x", snapshot="nowhere")
    with pytest.raises(NotFoundError, match="'x' is not open here"):
        stage.start("true", environment="x")
    with pytest.raises(RefusedError, match="'e' is open already"):
        stage.supervisor.open("e")


def test_a_command_gets_its_cores_and_is_told_how_many(stage: Stage) -> None:
    cores = sorted(os.sched_getaffinity(0))
    script = (
        "import os; print(sorted(os.sched_getaffinity(0)), {cores}, os.environ['SLACKWATER_CORES'])"
    )
    for given in (cores[:1], cores[-1:], cores):
        ran = stage.run("/usr/bin/env", "python3", "-c", script, cores=given)
        assert ran.stdout == f"{given} {len(given)} {len(given)}\n"


def test_more_cores_than_were_granted_cannot_be_taken(stage: Stage) -> None:
    if not stage.platform.fences.enforces_cores:
        pytest.skip("core pinning without control groups can be undone by the process itself")
    cores = sorted(os.sched_getaffinity(0))
    script = f"import os; os.sched_setaffinity(0, {cores}); print(len(os.sched_getaffinity(0)))"
    ran = stage.run("/usr/bin/env", "python3", "-c", script, cores=cores[:1])
    assert ran.stdout != f"{len(cores)}\n" or len(cores) == 1


def test_a_closed_environment_leaves_no_folder_and_no_mount(stage: Stage) -> None:
    stage.supervisor.open("goes")
    running = stage.start("sleep", "1000", environment="goes")
    stage.supervisor.close_environment("goes")
    assert stage.until_over(running).over.end is End.STOPPED
    assert not (stage.root / "environments" / "goes").exists()
    assert "goes" not in open("/proc/self/mounts").read()  # noqa: SIM115, PTH123


def test_an_environment_outlives_the_process_that_holds_its_namespaces(stage: Stage) -> None:
    stage.supervisor.open("held")
    assert stage.sh("echo kept > note", environment="held").over.status == 0
    view = str(stage.root / "environments" / "held" / "view")
    holders = [pid for pid in processes_with(view) if pid in process_tree.children(os.getpid())]
    for pid in holders:
        gone = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert select.select([gone], [], [], 30)[0]
        os.close(gone)
    assert stage.sh("cat note", environment="held").stdout == "kept\n"
    stage.supervisor.close_environment("held")
    assert wait_until_gone(view) == []


def test_an_environment_that_is_closed_at_once_leaves_nothing(stage: Stage) -> None:
    for number in range(10):
        stage.supervisor.open(f"brief-{number}")
        stage.supervisor.close_environment(f"brief-{number}")
    assert wait_until_gone(str(stage.root / "environments" / "brief-")) == []


def test_python_is_the_one_that_runs_the_service_with_what_is_installed_there(stage: Stage) -> None:
    told = stage.run("python3", "-c", "import sys, numpy; print(sys.prefix)")
    assert (told.stdout, told.stderr) == (f"{sys.prefix}\n", "")


@pytest.mark.parametrize("backend", ["process", "bubblewrap"])
def test_a_python_among_temporary_files_is_there_beside_an_actions_own(
    backend: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "bubblewrap" and (why := bubblewrap_missing()) is not None:
        pytest.skip(f"this machine has no working bubblewrap: {why}")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        Path(folder, "installed").write_text("yes")
        monkeypatch.setattr(sys, "prefix", folder)
        with a_stage(backend) as stage:
            stage.supervisor.open("e")
            assert stage.sh("echo mine > $TMPDIR/left").over.status == 0
            assert stage.sh(f"cat {folder}/installed $TMPDIR/left").stdout == "yesmine\n"
            if "foreign files" in stage.platform.backend.guarantees:
                assert stage.sh(f"echo no > {folder}/installed").over.status != 0
                assert stage.sh("ls $TMPDIR; ls /tmp").stdout.split() == ["left", Path(folder).name]
