"""Whatever an environment's files look like, its supervisor lives, and so does the next one."""

import json
import os
import signal
from pathlib import Path

import pytest
from sandbox_stage import Stage, a_stage, run_without_root

from slackwater.sandbox import process_tree, quarantine
from slackwater.sandbox.file_tasks import delete
from slackwater.sandbox.quarantine import MAX_TRIES, QUARANTINE_FOLDER
from slackwater.sandbox.reports import EnvironmentCreated, EnvironmentCreationFailed

NEST = """
import os
for _ in range({levels}):
    os.mkdir("d")
    os.chdir("d")
open("bottom", "w").write("x")
"""
CLOSED = "mkdir -p a/b/c; echo x > a/b/c/f; ln -s /etc link; chmod 000 a/b/c a/b a"


def nest(stage: Stage, environment: str, levels: int = 3000) -> None:
    """Folders in each other, as an action makes them that is over before anybody looks."""
    at = os.open(stage.root / "environments" / environment / "view", os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=at)
        at, above = os.open("d", os.O_RDONLY, dir_fd=at), at
        os.close(above)
    os.close(at)


def quarantine_of(stage: Stage) -> Path:
    return stage.root / "environments" / QUARANTINE_FOLDER


def check_deep_folders_are_deleted(stage: Stage) -> None:
    stage.supervisor.open("deep")
    nest(stage, environment="deep")
    stage.supervisor.close_environment("deep")
    stage.step_until(lambda: not list(quarantine_of(stage).iterdir()))
    assert stage.supervisor.quarantined == 0
    stage.supervisor.open("after")
    assert stage.sh("echo fine", environment="after").stdout == "fine\n"


def test_folders_nested_three_thousand_deep_are_deleted() -> None:
    with a_stage("process") as stage:
        check_deep_folders_are_deleted(stage)


def test_folders_nested_three_thousand_deep_are_deleted_without_root() -> None:
    def case() -> None:
        with a_stage("process") as stage:
            check_deep_folders_are_deleted(stage)

    run_without_root(case)


def test_folders_that_their_owner_closed_are_deleted_without_root() -> None:
    def case() -> None:
        with a_stage("process") as stage:
            stage.supervisor.open("e")
            assert stage.sh(CLOSED).over.status == 0
            stage.supervisor.close_environment("e")
            stage.step_until(lambda: not list(quarantine_of(stage).iterdir()))

    run_without_root(case)


def test_a_link_in_an_environment_is_deleted_and_not_what_it_leads_to() -> None:
    with a_stage("process") as stage:
        outside = stage.root / "outside"
        outside.mkdir()
        (outside / "kept").write_text("kept")
        stage.supervisor.open("e")
        assert stage.sh(f"ln -s {outside} link; mkdir d; ln -s {outside} d/link").over.status == 0
        stage.supervisor.close_environment("e")
        stage.step_until(lambda: not list(quarantine_of(stage).iterdir()))
        assert (outside / "kept").read_text() == "kept"


def check_poisoned_environments_do_not_stop_a_start(stage: Stage) -> None:
    """One that was meant to be kept, one that nobody meant to keep, one with a file that cannot be
    read.
    """
    note: dict[str, str | int] = {"job": "j", "memory_mib": 1}
    for name in ("kept", "left", "garbled"):
        stage.supervisor.open(name, note=note if name == "kept" else None)
        nest(stage, environment=name, levels=1200)  # deeper than Python recurs
    (stage.root / "environments" / "garbled" / "kept.json").write_text("[" * 50_000)
    stage.restart()
    assert set(stage.supervisor.adopt()) <= {"kept"}
    stage.supervisor.open("fresh")
    assert stage.sh("echo fine", environment="fresh").stdout == "fine\n"
    stage.step_until(lambda: not [each for each in quarantine_of(stage).iterdir() if each.is_dir()])


def test_poisoned_environments_do_not_stop_the_next_start() -> None:
    with a_stage("process") as stage:
        check_poisoned_environments_do_not_stop_a_start(stage)


def test_poisoned_environments_do_not_stop_the_next_start_without_root() -> None:
    def case() -> None:
        with a_stage("process") as stage:
            check_poisoned_environments_do_not_stop_a_start(stage)

    run_without_root(case)


def test_what_cannot_be_deleted_in_time_is_kept_aside_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quarantine, "DELETE_WITHIN_S", 1e-6)
    with a_stage("process") as stage:
        stage.supervisor.open("e")
        assert stage.sh("for i in $(seq 3000); do : > f$i; done").over.status == 0
        stage.supervisor.close_environment("e")
        # At once: a supervisor that gets no processor could hear first that all is deleted.
        stage.supervisor._workers.check_deadlines()
        stage.step_until(lambda: stage.supervisor.quarantined == 1)
        (reason,) = quarantine_of(stage).glob("*.reason")
        assert json.loads(reason.read_text()) == {
            "reason": "it took longer than 1e-06 s",
            "tries": 1,
        }
        stage.supervisor.open("e")
        assert stage.sh("echo fine").stdout == "fine\n"


def test_what_could_never_be_deleted_is_counted_and_left_alone_at_a_start() -> None:
    with a_stage("process") as stage:
        poisoned = quarantine_of(stage) / "x.0123"
        poisoned.mkdir()
        reason = poisoned.with_name("x.0123.reason")
        reason.write_text(json.dumps({"reason": "seen before", "tries": MAX_TRIES}))
        stage.restart()
        stage.supervisor.adopt()
        stage.supervisor.open("e")
        assert stage.sh("echo fine").stdout == "fine\n"
        assert stage.supervisor.quarantined == 1
        assert poisoned.is_dir()


def test_a_snapshot_keeps_the_holes_of_a_sparse_file() -> None:
    with a_stage("process") as stage:
        stage.supervisor.open("e")
        script = "truncate -s 8G big; printf head 1<>big; printf tail >> big"
        assert stage.sh(script, disk_bytes=16 << 30).over.status == 0
        assert stage.snapshot("e", "sparse") is None
        copied = (stage.root / "snapshots" / "sparse" / "big").stat()
        assert copied.st_size == (8 << 30) + 4
        assert copied.st_blocks * 512 < 1 << 20
        stage.supervisor.open("again", snapshot="sparse")
        ran = stage.sh("head -c 4 big; tail -c 4 big", environment="again", disk_bytes=16 << 30)
        assert ran.stdout == "headtail"


def test_other_actions_go_on_while_a_snapshot_is_taken() -> None:
    with a_stage("process") as stage:
        stage.supervisor.open("e")
        assert stage.sh("for i in $(seq 300); do echo $i > f$i; done").over.status == 0
        stage.supervisor.open("other")
        stage.supervisor.snapshot("e", "many")
        assert stage.sh("echo fine", environment="other").stdout == "fine\n"
        stage.step_until(lambda: "many" in stage.platform.snapshots.names())


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("truncate -s 300G a", "more than 274877906944 apparent bytes"),
        (
            'python3 -c "' + NEST.format(levels=600).replace('"', "'") + '"',
            "nested deeper than 512",
        ),
    ],
)
def test_a_snapshot_of_too_much_is_refused_and_leaves_nothing(script: str, why: str) -> None:
    with a_stage("process") as stage:
        stage.supervisor.open("e")
        stage.sh(script, disk_bytes=1 << 40)
        error = stage.snapshot("e", "much")
        assert error is not None
        assert why in error
        assert stage.platform.snapshots.names() == []
        stage.step_until(lambda: not stage.platform.snapshots.find_partial())
        stage.supervisor.open("fresh")
        assert stage.sh("echo fine", environment="fresh").stdout == "fine\n"


def test_a_snapshot_of_an_environment_that_is_closed_meanwhile_is_answered() -> None:
    with a_stage("process") as stage:
        stage.supervisor.open("e")
        stage.supervisor.snapshot("e", "gone")
        stage.supervisor.close_environment("e")
        assert stage.platform.snapshots.names() in ([], ["gone"])


def test_a_snapshot_by_a_name_with_a_colon_begins_an_environment() -> None:
    with a_stage("process") as stage:
        stage.supervisor.open("e:1", files={"file": b"here"})
        assert stage.sh("echo more >> file", environment="e:1").over.status == 0
        assert stage.snapshot("e:1", "a:b") is None
        stage.supervisor.open("e:2", snapshot="a:b")
        assert stage.sh("cat file", environment="e:2").stdout == "heremore\n"


def test_a_file_behind_a_link_of_a_snapshot_is_refused() -> None:
    with a_stage("process") as stage:
        outside = stage.root / "outside"
        outside.mkdir(mode=0o777)
        stage.supervisor.open("e")
        assert stage.sh(f"ln -s {outside} way; ln -s {outside}/f file").over.status == 0
        assert stage.snapshot("e", "links") is None
        for path in ("way/in", "file"):
            stage.supervisor.open("bad", snapshot="links", files={path: b"x"})
            failed = stage.until(lambda report: isinstance(report, EnvironmentCreationFailed))
            assert isinstance(failed, EnvironmentCreationFailed)
            assert f"files: '{path}' cannot be written" in failed.reason
        assert list(outside.iterdir()) == []


def test_a_file_worker_that_is_killed_fails_its_task_alone() -> None:
    with a_stage("process") as stage:
        before = set(process_tree.helpers)
        stage.supervisor.open("e", files={"big": bytes(64 << 20)})
        for helper in process_tree.helpers - before:
            os.kill(helper, signal.SIGKILL)
        stage.until(
            lambda report: isinstance(report, EnvironmentCreationFailed | EnvironmentCreated)
        )
        stage.supervisor.open("next", files={"small": b"x"})
        assert stage.sh("cat small", environment="next").stdout == "x"


def test_a_folder_is_deleted_by_name_without_following_it(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "file").write_text("kept")
    (tmp_path / "link").symlink_to(target)
    delete(str(tmp_path), "link")
    assert not (tmp_path / "link").is_symlink()
    assert (target / "file").read_text() == "kept"
