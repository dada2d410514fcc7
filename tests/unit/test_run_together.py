"""Test commands that run beside each other: what is shown, the exit status, and Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slackwater.sandbox.process_tree import is_alive

SCRIPT = Path(__file__).parents[2] / "scripts" / "run_together.py"
LIMIT_S = 120.0


def together(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_each_output_is_shown_whole_and_one_failure_is_the_status() -> None:
    failing = "b=sh -c 'echo three; echo 1 failed; exit 3'"
    with together("a=sh -c 'echo one; echo 2 passed'", failing) as running:
        shown, _ = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 1
    assert "=== a ===\none\n2 passed\n" in shown
    assert "=== b ===\nthree\n1 failed\n" in shown
    *_, a, b, _ = shown.splitlines()
    assert (a.startswith("a: passed after"), a.endswith(": 2 passed")) == (True, True)
    assert b.startswith("b: FAILED with status 3 after")


def test_commands_run_at_once_and_the_low_ones_with_a_lower_priority(tmp_path: Path) -> None:
    """Each waits for the other's pipe."""
    for name in "ab":
        os.mkfifo(tmp_path / name)
    first = f"a=sh -c 'echo > {tmp_path}/a; read x < {tmp_path}/b; nice'"
    second = f"b=sh -c 'read x < {tmp_path}/a; echo > {tmp_path}/b; nice'"
    with together(first, "--low", second) as running:
        shown, _ = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 0
    assert f"=== a ===\n{os.nice(0)}\n" in shown
    assert f"=== b ===\n{min(os.nice(0) + 10, 19)}\n" in shown


@pytest.mark.parametrize("refuses", [False, True])
def test_ctrl_c_ends_all_and_a_second_one_those_that_refuse(tmp_path: Path, refuses: bool) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    trap = f'trap "echo > {pipe}" INT; ' if refuses else ""
    sleeps = f"{trap}echo $$ > {pipe}; sleep 600; sleep 600"
    with together(f"a=sh -c '{sleeps}'", "b=true") as running:
        pid = int(pipe.read_text())
        os.kill(running.pid, signal.SIGINT)
        if refuses:
            assert pipe.read_text() == "\n"
            os.kill(running.pid, signal.SIGINT)
        shown, _ = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 130
    assert "a: FAILED with status" in shown
    deadline_s = time.monotonic() + LIMIT_S
    while is_alive(pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
