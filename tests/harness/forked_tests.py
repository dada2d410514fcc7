"""Runs tests in processes that are forked once all tests are collected: `--processes N`.

What tests import takes longer to import than many of them to run, and forks share it. A process
takes one group of tests after another: a file, or what a `GROUP` names. Nothing is imported or
collected twice, and no process waits for a group that another one holds back.
"""

import contextlib
import os
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import pytest

from slackwater.wire.forked_process import has_one_thread

GROUP = pytest.StashKey[str]()  # of an item that is not grouped by its file
_MOST = 8
# While tests are collected. NumPy starts threads at its import; looking for a GPU by its driver
# would leave it unusable in forks.
_FOR_FORKS = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_Location = tuple[str, int | None, str]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processes",
        type=int,
        metavar="N",
        help="run tests in N forked processes, file by file; 0: one more than cores",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect without what a fork does not copy."""
    with pytest.MonkeyPatch.context() as patch:
        if session.config.getoption("processes") is not None:
            for name, value in _FOR_FORKS.items():
                patch.setenv(name, value)
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.getoption("processes")
    if count is None or session.testsfailed or session.config.option.collectonly:
        return None
    assert has_one_thread(), "tests cannot be forked: a module that they import starts a thread"
    TestProcesses(session).run(count or min(len(os.sched_getaffinity(0)) + 1, _MOST))  # tests wait
    return True


@dataclass
class _Worker:
    number: int
    pid: int
    tests: list[pytest.Item] = field(default_factory=list)  # of its group, not done
    begun: bool = False  # the first of them


class TestProcesses:
    """The processes, from the one that collected and that reports."""

    def __init__(self, session: pytest.Session) -> None:
        self._session, self._hook = session, session.config.hook
        self._numbers = {item: number for number, item in enumerate(session.items)}
        groups: dict[str, list[pytest.Item]] = {}
        for item in session.items:
            groups.setdefault(item.stash.get(GROUP, str(item.path)), []).append(item)
        self._waiting = deque(groups.values())
        self._workers: dict[Connection, _Worker] = {}
        self._forked = 0

    def run(self, count: int) -> None:
        """Run all tests; pytest.Session.Failed or Interrupted as soon as pytest wants to stop."""
        for _ in range(min(count, len(self._waiting))):
            self._fork()
        try:
            while self._workers:
                for channel in wait(list(self._workers)):
                    assert isinstance(channel, Connection)
                    self._hear(channel)
                self._stop_where_asked()
        finally:  # their channels close: they leave after the test that they run
            for channel, worker in self._workers.items():
                channel.close()
                os.waitpid(worker.pid, 0)

    def _stop_where_asked(self) -> None:
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _fork(self) -> None:
        ours, theirs = Pipe()
        number, self._forked = self._forked, self._forked + 1
        if not (pid := os.fork()):
            for other in (ours, *self._workers):
                other.close()  # so that each process sees when the other end of its own does
            _work(self._session, theirs, number)
        theirs.close()
        self._workers[ours] = _Worker(number, pid)

    def _hear(self, channel: Connection) -> None:
        worker = self._workers[channel]
        try:
            kind, told = channel.recv()
        except (EOFError, ConnectionResetError):
            self._replace(channel, worker)
            return
        if kind == "next":
            self._assign(channel, worker)
        elif kind == "started":
            worker.begun = True
            self._hook.pytest_runtest_logstart(**told)
        elif kind == "finished":
            worker.tests, worker.begun = worker.tests[1:], False
            self._hook.pytest_runtest_logfinish(**told)
        elif kind == "warned":
            text, category, *place = told.pop("said")
            message = warnings.WarningMessage(text, type(category, (Warning,), {}), *place)
            told["warning_message"] = message
            self._hook.pytest_warning_recorded.call_historic(kwargs=told)
        else:
            report = self._hook.pytest_report_from_serializable(
                config=self._session.config, data=told
            )
            self._hook.pytest_runtest_logreport(report=report)

    def _assign(self, channel: Connection, worker: _Worker) -> None:
        worker.tests = self._waiting.popleft() if self._waiting else []
        channel.send([self._numbers[item] for item in worker.tests])

    def _replace(self, channel: Connection, worker: _Worker) -> None:
        """A process has ended: as it should, or in the middle of a test, which then has failed."""
        del self._workers[channel]
        channel.close()
        _, status = os.waitpid(worker.pid, 0)
        if status == 0 and not worker.tests:
            return
        lost = worker.tests[0] if worker.tests else self._session.items[-1]
        how = f"the process of this test ended with status {os.waitstatus_to_exitcode(status)}"
        report = pytest.TestReport(
            lost.nodeid, lost.location, {}, "failed", how, "call" if worker.begun else "teardown"
        )
        self._hook.pytest_runtest_logreport(report=report)
        if worker.tests[1:]:
            self._waiting.appendleft(worker.tests[1:])
        if self._waiting:
            self._fork()


class _Reporter:
    """In the place of the terminal's: tells the process that reports what this one's tests did."""

    def __init__(self, config: pytest.Config, channel: Connection) -> None:
        self._config, self._channel = config, channel
        self._tw = config.get_terminal_writer()  # where a test that hangs shows its stacks
        self.is_heard = False  # until it has been given the warnings before the fork again

    def _tell(self, kind: str, told: dict[str, Any]) -> None:
        self._channel.send((kind, told))

    def pytest_runtest_logstart(self, nodeid: str, location: _Location) -> None:
        self._tell("started", {"nodeid": nodeid, "location": location})

    def pytest_runtest_logfinish(self, nodeid: str, location: _Location) -> None:
        self._tell("finished", {"nodeid": nodeid, "location": location})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._tell("reported", told)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: object
    ) -> None:
        if not self.is_heard:
            return
        one = warning_message
        said = str(one.message), one.category.__name__, one.filename, one.lineno
        self._tell("warned", {"said": said, "when": when, "nodeid": nodeid, "location": location})


class _End(pytest.Item):
    """After the last test of a group: what no other group needs is taken down."""

    def runtest(self) -> None:
        raise NotImplementedError


def _work(session: pytest.Session, channel: Connection, number: int) -> NoReturn:
    """Run groups of tests until there is none, or until nobody hears of them."""
    status = 1
    try:
        reporter = _become_worker(session.config, channel, number)
        _run_groups(session, channel, reporter)
        session.config._ensure_unconfigure()  # fails on errors that were raised where none is seen
        status = 0
    except (KeyboardInterrupt, ConnectionError, EOFError):
        with contextlib.suppress(Exception):
            session._setupstate.teardown_exact(None)
    except BaseException:  # noqa: BLE001
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(status)


def _become_worker(config: pytest.Config, channel: Connection, number: int) -> _Reporter:
    """Give this process its own captured output, reporter and folder for temporary files."""
    plugins = config.pluginmanager
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    reporter = _Reporter(config, channel)
    plugins.unregister(name="terminalreporter")
    plugins.register(reporter, "terminalreporter")
    reporter.is_heard = True
    folders: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / f"w{number}"
    folders._basetemp.mkdir(mode=0o700)
    return reporter


def _run_groups(session: pytest.Session, channel: Connection, reporter: _Reporter) -> None:
    end = _End.from_parent(session, name="end")
    item: pytest.Item | None = None
    while group := _next_group(channel):
        tests = [session.items[number] for number in group]
        for item, following in zip(tests, [*tests[1:], end], strict=True):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    if item is not None:  # fixtures of the whole session belong to the last test
        call = pytest.CallInfo.from_call(
            lambda: session._setupstate.teardown_exact(None), "teardown", (KeyboardInterrupt,)
        )
        report = session.config.hook.pytest_runtest_makereport(item=item, call=call)
        if report.failed:
            reporter.pytest_runtest_logreport(report)


def _next_group(channel: Connection) -> list[int]:
    channel.send(("next", None))
    group: list[int] = channel.recv()
    return group
