"""What a forked child keeps of its parent, and what not."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from slackwater.wire.forked_process import ForkedProcess, has_one_thread

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Of a process with one thread, which the one that runs the tests is not.
FORKING = """
import os, signal, socket, sys
from pathlib import Path
from slackwater.wire.forked_process import fork, has_one_thread

signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
kept, dropped = socket.socketpair()

def child():
    found = sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1]  # the list's own
    print(found == [0, 1, 2, kept.fileno()])
    print(os.read(0, 1), Path("/proc/self/cmdline").read_bytes().split(b"\\0")[:2])
    print(signal.getsignal(signal.SIGTERM).name, signal.getsignal(signal.SIGUSR1).name)
    sys.stdout.flush()
    if sys.argv[1] == "fail":
        raise ValueError("no such thing")
    if sys.argv[1] == "wait":
        kept.close()
        signal.pause()

assert has_one_thread()
process = fork(child, ["shown", "so"], [kept.fileno()])
kept.close()
assert dropped.recv(1) == b""  # the child has closed its end, or has ended
if sys.argv[1] == "wait":
    process.terminate()
print(process.wait())
"""


def forked(how: str) -> tuple[list[str], str]:
    """What the child and then its parent say, and the child's traceback."""
    command = [sys.executable, "-c", FORKING, how]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.PIPE
    )
    return done.stdout.splitlines(), done.stderr


SEEN = ["True", "b'' [b'shown', b'so']", "SIG_DFL SIG_IGN"]


@LINUX
def test_a_child_has_its_descriptors_no_input_no_handlers_and_its_own_command_line() -> None:
    assert forked("end") == ([*SEEN, "0"], "")


@LINUX
def test_a_child_that_fails_says_why_and_never_goes_on_as_its_parent() -> None:
    said, error = forked("fail")
    assert said == [*SEEN, "1"]
    assert error.endswith("ValueError: no such thing\n")


@LINUX
def test_a_signal_that_its_parent_handles_ends_it() -> None:
    assert forked("wait") == ([*SEEN, str(-signal.SIGTERM)], "")


@LINUX
def test_a_process_with_a_second_thread_is_not_for_forking() -> None:
    enough = threading.Event()
    thread = threading.Thread(target=enough.wait)
    thread.start()
    try:
        assert not has_one_thread()
    finally:
        enough.set()
        thread.join()


def test_a_process_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ChildProcessError):
        ForkedProcess(["init"], os.getppid())
