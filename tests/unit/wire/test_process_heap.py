"""How a process keeps its memory."""

import subprocess
import sys

import pytest

_THREADS_ALLOCATE = """
import ctypes, threading
from slackwater.wire.memory import keep_heap_small


keep_heap_small()
allocated = threading.Barrier(8)

def allocate():
    held = [ctypes.create_string_buffer(4096) for _ in range(100)]
    allocated.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
ctypes.CDLL(None).malloc_stats()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_all_threads_of_a_process_share_one_heap() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _THREADS_ALLOCATE],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stderr.count("Arena") == 1, ended.stderr
