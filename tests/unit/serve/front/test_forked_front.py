"""A forked front end outlives the Ctrl-C of the terminal: the control plane stops it."""

import asyncio
import os
import signal
import socket
import time
from contextlib import closing
from pathlib import Path

from slackwater.serve.front.processes import ForkedFront


def ignores(pid: int, number: signal.Signals) -> bool:
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return bool(int(fields["SigIgn"], 16) >> (number - 1) & 1)


def test_ctrl_c_before_its_start_does_not_end_it(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        front = ForkedFront(listening, tmp_path / "front.log")
        try:
            deadline_s = time.monotonic() + 30
            while not (ignores(front.pid, signal.SIGINT) and ignores(front.pid, signal.SIGTERM)):
                assert time.monotonic() < deadline_s
                time.sleep(0.005)
            os.kill(front.pid, signal.SIGINT)
            front.begin(tmp_path)  # raises if it has ended
        finally:
            front.kill()
            asyncio.run(asyncio.wait_for(front.wait(), 30))
