"""What the suite's own way to run tests in several processes reports."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 240.0
CONFTEST = """
import pathlib, pytest
pytest_plugins = ["harness.forked_tests"]

@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    yield tmp_path_factory.mktemp("shared")
    assert not pathlib.Path("break_the_end").exists()
"""
TESTS = """
import os, pathlib, pytest, time, warnings

def test_first(shared, tmp_path):
    pathlib.Path(f"{__name__}.ran").write_text(str(os.getpid()))
    (tmp_path / "own").touch()

def test_same_process(shared):
    assert pathlib.Path(f"{__name__}.ran").read_text() == str(os.getpid())

@pytest.mark.skipif("not pathlib.Path('break_tests').exists()", reason="nothing is to break")
@pytest.mark.parametrize("how", ["assert", "end", "hang", "warn"])
def test_how(how):
    print("said before")
    if how == "warn":
        warnings.warn("careful")
    elif how == "end":
        os._exit(7)
    elif how == "hang":
        if (waiting := pathlib.Path("hanging")).exists():
            waiting.write_text("now\\n")
        time.sleep(600)
    else:
        assert how == "something else"

def test_last(shared):
    pass
"""


def start(folder: Path, *options: str) -> "subprocess.Popen[str]":
    (folder / "conftest.py").write_text(CONFTEST)
    for name in ("test_a.py", "test_b.py", "test_c.py"):
        (folder / name).write_text(TESTS)
    (folder / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "-p", "pytest_timeout", "-q"]
    return subprocess.Popen(
        [*command, "--processes", "2", *options],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_every_test_runs_once_and_those_of_a_file_in_one_process(tmp_path: Path) -> None:
    with start(tmp_path) as running:
        shown, _ = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 0, shown
    assert "9 passed, 12 skipped" in shown.splitlines()[-1]
    ran = list(tmp_path.glob("*.ran"))
    assert len(ran) == 3 and 1 <= len({file.read_text() for file in ran}) <= 2


def test_whatever_fails_in_a_process_fails_its_test(tmp_path: Path) -> None:
    """Also a process that ends, a test that hangs, and what is found when all tests are done."""
    for name in ("break_tests", "break_the_end"):
        (tmp_path / name).touch()
    with start(tmp_path, "--timeout=1") as running:
        shown, _ = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 1, shown
    assert "9 failed, 12 passed, 3 warnings, 2 errors" in shown.splitlines()[-1]
    assert shown.count("UserWarning: careful") == 3
    assert shown.count("_ test_how[end] _") == 3
    assert "this test ended with status 7" in shown
    assert "Timeout (>1.0s)" in shown
    assert "said before" in shown
    assert "ERROR at teardown of test_last" in shown


def test_no_group_of_tests_begins_after_as_many_failures_as_asked_for(tmp_path: Path) -> None:
    (tmp_path / "break_tests").touch()
    with start(tmp_path, "-x", "-k", "assert or last") as running:
        shown, _ = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 1, shown
    assert "stopping after 1 failures" in shown


def test_an_interruption_ends_all_processes(tmp_path: Path) -> None:
    (tmp_path / "break_tests").touch()
    os.mkfifo(tmp_path / "hanging")
    with start(tmp_path, "-k", "hang") as running:
        with (tmp_path / "hanging").open() as hanging:
            assert hanging.readline() == "now\n"
        os.killpg(running.pid, signal.SIGINT)
        shown, _ = running.communicate(timeout=LIMIT_S)
    assert running.returncode == pytest.ExitCode.INTERRUPTED, shown
    assert "KeyboardInterrupt" in shown
