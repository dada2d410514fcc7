"""Escapes: whatever a backend promises to keep an action from, it does."""

import os
import socket
from pathlib import Path

import pytest
from sandbox_stage import Stage, processes_with, wait_until_gone

from harness.sleep_markers import sleep_marker
from slackwater.sandbox.backends.bubblewrap import ETC, copy_etc
from slackwater.sandbox.backends.port import Guarantee


def needs(stage: Stage, guarantee: Guarantee) -> None:
    if guarantee not in stage.platform.backend.guarantees:
        name = stage.platform.backend.name
        pytest.skip(f"{name} promises nothing about {guarantee} without root")


def test_files_outside_cannot_be_written(stage: Stage) -> None:
    needs(stage, "foreign files")
    outside = stage.root / "outside"
    outside.write_text("untouched")
    for target in (outside, Path("/etc/slackwater-was-here"), Path("/usr/slackwater-was-here")):
        ran = stage.sh(f"echo escaped > {target}")
        assert ran.over.status != 0
    assert outside.read_text() == "untouched"
    assert not Path("/etc/slackwater-was-here").exists()


def test_temporary_files_do_not_reach_the_machines(stage: Stage) -> None:
    needs(stage, "foreign files")
    stage.sh("for d in /tmp /var/tmp /dev/shm; do echo x > $d/slackwater-was-here; done")
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):
        assert not Path(folder, "slackwater-was-here").exists()


def test_a_neighbours_files_cannot_be_read(stage: Stage) -> None:
    needs(stage, "neighbours' files")
    stage.supervisor.open("secret", files={"answer": b"42"})
    view = stage.root / "environments" / "secret" / "view"
    for path in (view / "answer", "../../secret/view/answer", "/proc/1/root/etc/shadow"):
        ran = stage.sh(f"cat {path}")
        assert ran.over.status != 0
        assert "42" not in ran.stdout
    ran = stage.sh(f"ln -s {view}/answer link; cat link; rm link")
    assert "42" not in ran.stdout
    stage.supervisor.close_environment("secret")


def test_the_network_is_out_of_reach(stage: Stage) -> None:
    needs(stage, "network")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        dial = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5); print('in')"
        ran = stage.run("/usr/bin/env", "python3", "-c", dial)
        assert (ran.stdout, ran.over.status) == ("", 1)


def test_an_action_can_talk_to_itself_without_the_network(stage: Stage) -> None:
    needs(stage, "network")
    itself = (
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname(), 5)\n"
        "print('heard')\n"
    )
    assert stage.run("/usr/bin/env", "python3", "-c", itself).stdout == "heard\n"


def test_neighbours_cannot_be_signalled(stage: Stage) -> None:
    needs(stage, "signals")
    stage.supervisor.open("victim")
    number = sleep_marker()
    marker = f"sleep {number}"
    victim = stage.start("sleep", str(number), environment="victim")
    stage.step_until(lambda: bool(processes_with(marker)))
    pids = " ".join(str(pid) for pid in [*processes_with(marker), os.getpid()])
    stage.sh(f"kill -9 {pids}; kill -9 -1; true")
    assert processes_with(marker)
    stage.supervisor.stop(victim, "seen")
    stage.until_over(victim)
    stage.supervisor.close_environment("victim")
    assert wait_until_gone(marker) == []


def test_no_rights_come_from_programs_that_give_them(stage: Stage) -> None:
    ran = stage.sh("grep NoNewPrivs /proc/self/status")
    assert ran.stdout.split() == ["NoNewPrivs:", "1"]


def test_an_action_keeps_nothing_of_who_started_it(stage: Stage) -> None:
    needs(stage, "signals")
    told = stage.sh("cat /proc/self/status; ls /proc/self/fd | wc -l; ulimit -c; umask").stdout
    fields = dict(line.split(":\t") for line in told.splitlines() if ":\t" in line)
    assert len(set(fields["Uid"].split())) == 1
    assert len(set(fields["Gid"].split())) == 1
    if stage.platform.users is not None:
        assert int(fields["Uid"].split()[0]) != os.getuid()
        assert fields["Groups"].strip() == ""
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert int(fields[name], 16) == 0, name
    assert fields["NoNewPrivs"] == "1"
    assert int(fields["SigBlk"], 16) == 0
    assert told.splitlines()[-3:] == ["4", "0", "0022"]  # 0, 1, 2, and the folder that is listed


def test_of_etc_only_what_is_public_is_shown(tmp_path: Path) -> None:
    shown = tmp_path / "etc"
    (shown / "left").mkdir(parents=True)
    copy_etc(shown)
    assert {entry.name for entry in shown.iterdir()} <= set(ETC)
    assert (shown / "passwd").read_bytes() == Path("/etc/passwd").read_bytes()
    assert not (shown / "ssl" / "private").exists()
    assert shown.stat().st_mode & 0o777 == 0o755
