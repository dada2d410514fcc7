"""How a worker process ends."""

import subprocess
import sys

import pytest

# A worker that is told to leave while threads of its own are in the middle of PyTorch.
_WORKER = """
import atexit, os, signal, sys, threading
import torch
from slackwater.model.errors import ConfigError
from slackwater.worker.process import run_worker

def compute(begun):
    matrix = torch.ones(300, 300)
    while True:
        matrix = torch.tanh(matrix @ matrix)
        begun.set()

def main():
    torch.set_num_threads(1)
    atexit.register(print, "cleaned up")
    for _ in range(3):
        begun = threading.Event()
        threading.Thread(target=compute, args=(begun,), daemon=True).start()
        begun.wait(60)
    if sys.argv[1] == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    if sys.argv[1] == "error":
        raise ConfigError.of("a field", 1, "must be 2")

run_worker(main, by_hand=True)
"""


@pytest.mark.parametrize(("how", "status"), [("return", 0), ("signal", 0), ("error", 2)])
def test_a_worker_leaves_cleanly_while_its_threads_compute(how: str, status: int) -> None:
    command = [sys.executable, "-c", _WORKER, how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "terminate called" not in ended.stderr
    assert (ended.returncode, ended.stdout) == (status, "cleaned up\n"), ended.stderr
