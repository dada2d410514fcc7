"""No request ends a sandbox worker: it is answered with what was wrong, and the next one works."""

import pytest
from sandbox_stage import run_without_root
from worker_stage import WorkerStage, a_worker, open_environment, run_action

from slackwater.wire import sandbox
from slackwater.wire.messages import Heartbeat


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a\0b", "without NUL"),
        ("../out", "inside the environment"),
        ("/etc/x", "inside the environment"),
        ("a/../../b", "inside the environment"),
        ("", "inside the environment"),
        ("folder/", "inside the environment"),
        ("x" * 300, "at most 255 bytes"),
        ("é" * 200, "at most 255 bytes"),
        ("/".join("d" * 65), "at most 64 components"),
        ("lone\udc80", "without NUL and surrogates"),
    ],
)
def test_a_file_name_that_cannot_be_is_refused_and_the_worker_lives(name: str, why: str) -> None:
    with a_worker() as worker:
        worker.tell(open_environment("e", files={name: b""}))
        failed = worker.answer(sandbox.EnvironmentFailed, lambda said: said.environment == "e")
        assert failed.reason.startswith("files: ")
        assert why in failed.reason
        worker.check_lives()


def check_nul_is_refused(worker: WorkerStage) -> None:
    over, _ = worker.run("/bin/echo", "a\0b")
    assert (over.end, "command: " in over.reason) == ("not_started", True)
    for variables in ({"A": "x\0y"}, {"A\0": "x"}, {"A=B": "x"}, {"": "x"}):
        over, _ = worker.run("/bin/true", variables=variables)
        assert (over.end, "variables: " in over.reason) == ("not_started", True)
    for name in ("n\0ul", ".hidden", "a/b", "", "x" * 201):
        worker.tell(open_environment(name))
        assert worker.refusal(name)
        worker.tell(sandbox.KeepSnapshot(7, "e", name))
        assert worker.answer(sandbox.SnapshotKept, lambda said: said.request == 7).error
        worker.tell(open_environment("from", snapshot=name))
        worker.answer(sandbox.EnvironmentFailed, lambda said: said.environment == "from")
    worker.check_lives()


def test_nul_bytes_in_commands_variables_and_names_are_refused() -> None:
    with a_worker() as worker:
        worker.tell(open_environment("e"))
        check_nul_is_refused(worker)


def test_nul_bytes_in_commands_variables_and_names_are_refused_without_root() -> None:
    def case() -> None:
        with a_worker() as worker:
            worker.tell(open_environment("e"))
            check_nul_is_refused(worker)

    run_without_root(case)


def test_an_unexpected_fault_is_the_answer_to_its_request_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with a_worker() as worker:
        worker.tell(open_environment("e", files={"a": None}))
        failed = worker.answer(sandbox.EnvironmentFailed, lambda said: said.environment == "e")
        assert failed.reason
        over, _ = worker.run("/bin/true", limits=None)
        assert over.end == "not_started"
        assert "request failed message=RunAction" in caplog.text
        assert "Traceback" in caplog.text
        worker.check_lives()


def test_an_order_that_waits_comes_before_what_is_left_of_an_action(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[list[str]] = []
    with a_worker() as worker:
        supervisor, wire = worker.stage.supervisor, worker.wire
        send, open_one = wire.send, supervisor.open

        def second_comes_with_the_end_of_the_first(*frames: bytes) -> None:
            send(*frames)
            if (
                any(isinstance(said, sandbox.ActionFinished) for said in wire.answers)
                and not held[1:]
            ):
                wire.tell(run_action(2, ["/bin/true"]))

        def record_and_open(name: str) -> None:
            held.append(supervisor.environments())
            open_one(name)

        monkeypatch.setattr(wire, "send", second_comes_with_the_end_of_the_first)
        monkeypatch.setattr(supervisor, "open", record_and_open)
        worker.tell(run_action(1, ["/bin/true"]))
        assert worker.outcome(2).status == 0
        assert held == [[], ["once-1"]]
        worker.answer(Heartbeat, lambda beat: beat.gauges["environments"] == 0)


def test_a_worker_that_is_told_to_leave_leaves() -> None:
    with a_worker() as worker, pytest.raises(SystemExit):
        worker.worker._execute = leave  # type: ignore[method-assign]
        worker.tell(open_environment("e"))


def leave(message: object) -> None:
    raise SystemExit(0)


def test_an_environment_is_ready_when_its_files_are_there() -> None:
    with a_worker() as worker:
        worker.tell(open_environment("e", files={"src/a": b"1", "b": b"2"}))
        worker.answer(sandbox.EnvironmentReady, lambda said: said.environment == "e")
        over, printed = worker.run("/bin/cat", "src/a", "b", environment="e")
        assert (over.status, printed) == (0, b"12")
        worker.tell(sandbox.KeepSnapshot(1, "e", "kept"))
        assert worker.answer(sandbox.SnapshotKept, lambda said: said.request == 1).error is None
        worker.tell(open_environment("f", snapshot="kept"))
        over, printed = worker.run("/bin/cat", "src/a", "b", environment="f")
        assert (over.status, printed) == (0, b"12")
        worker.answer(sandbox.EnvironmentReady, lambda said: said.environment == "f")


def test_an_action_in_an_environment_that_fails_to_open_is_answered() -> None:
    with a_worker() as worker:
        worker.tell(open_environment("e"))
        over, _ = worker.run("/bin/ln", "-s", "/nowhere", "link", environment="e")
        assert over.status == 0
        worker.tell(sandbox.KeepSnapshot(1, "e", "kept"))
        assert worker.answer(sandbox.SnapshotKept, lambda said: said.request == 1).error is None
        worker.wire.tell(open_environment("f", snapshot="kept", files={"link/file": b""}))
        over, _ = worker.run("/bin/true", environment="f")
        assert over.end == "not_started"
        assert "'link/file' cannot be written" in over.reason
        worker.answer(sandbox.EnvironmentFailed, lambda said: said.environment == "f")


def test_a_heartbeat_tells_what_is_quarantined() -> None:
    with a_worker() as worker:
        worker.check_lives()
        gauges = [said.gauges for said in worker.wire.answers if isinstance(said, Heartbeat)]
        assert gauges[-1]["quarantined"] == 0.0
