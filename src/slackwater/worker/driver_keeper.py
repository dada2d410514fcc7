"""Keeps one driver: starts it, logs its output and exit status, and ends it on request.

    python -m slackwater.worker.driver_keeper FOLDER ATTEMPT LOCK GRACE_S COMMAND...

It outlives the control plane, so that the log and the status are there when the plane returns; the
lock that it inherits as descriptor LOCK shows whether it lives. On SIGTERM the driver's process
group gets SIGTERM, and SIGKILL after GRACE_S. If the keeper is killed, the kernel kills the driver
(Linux). Standard library only.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import FrameType

from slackwater.sandbox.linux import die_with_parent
from slackwater.wire.driver_files import DriverFiles, DriverKeeperRecord, Exit, LogWriter

_LOOK_S = 0.1
_LAST_WORDS_S = 1.0
NOT_STARTED = 127


class DriverKeeper:
    """One attempt of one driver."""

    def __init__(self, files: DriverFiles, attempt: int, lock: int, grace_s: float) -> None:
        self._files = files
        self._attempt = attempt
        self._lock = lock
        self._grace_s = grace_s
        self._log = LogWriter(files)
        self._asked_s: float | None = None

    def ask_to_leave(self, number: int, frame: FrameType | None) -> None:
        if self._asked_s is None:
            self._asked_s = time.monotonic()

    def run(self, command: list[str]) -> None:
        """Until the driver has ended."""
        reading, writing = os.pipe()
        try:
            driver = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
                pass_fds=(self._lock,),
                preexec_fn=partial(_die_with_keeper, os.getpid()),
            )
        except OSError as error:
            self._log.write(f"{command[0]}: {error.strerror}\n".encode())
            self._files.write_exit(Exit(self._attempt, NOT_STARTED))
            return
        os.close(writing)
        url = os.environ.get("SLACKWATER_URL", "")
        self._files.write_keeper(DriverKeeperRecord(self._attempt, os.getpid(), driver.pid, url))
        status = self._follow(driver, reading)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(driver.pid, signal.SIGKILL)  # what it left behind
        self._log.close()
        self._files.write_exit(Exit(self._attempt, status))

    def _follow(self, driver: "subprocess.Popen[bytes]", reading: int) -> int:
        told = killed = False
        ended_s: float | None = None
        hears = True
        while True:
            if hears:
                hears = self._hear(reading)
            else:
                time.sleep(_LOOK_S)
            now_s = time.monotonic()
            status = driver.poll()
            if status is not None:
                ended_s = now_s if ended_s is None else ended_s
                # Descendants may hold the pipe open for ever; they get a moment.
                if not hears or now_s - ended_s > _LAST_WORDS_S:
                    return status
                continue
            if self._asked_s is not None and not told:
                told = _signal(driver.pid, signal.SIGTERM)
            overdue = self._asked_s is not None and now_s - self._asked_s > self._grace_s
            if overdue and not killed:
                killed = _signal(driver.pid, signal.SIGKILL)

    def _hear(self, reading: int) -> bool:
        """Log new output; False at its end."""
        ready, _, _ = select.select([reading], [], [], _LOOK_S)
        if not ready:
            return True
        said = os.read(reading, 1 << 16)
        if said:
            with contextlib.suppress(OSError):  # a full disk costs lines, not the driver
                self._log.write(said)
        return bool(said)


def _signal(group: int, number: signal.Signals) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
    return True


def _die_with_keeper(keeper: int) -> None:
    if sys.platform == "linux":
        die_with_parent(signal.SIGKILL)
    if os.getppid() != keeper:  # it died before the call
        os._exit(NOT_STARTED)


def _go_on(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which the driver would inherit."""


def main() -> None:
    folder, attempt, lock, grace_s, *command = sys.argv[1:]
    keeper = DriverKeeper(DriverFiles(Path(folder)), int(attempt), int(lock), float(grace_s))
    signal.signal(signal.SIGTERM, keeper.ask_to_leave)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _go_on)
    keeper.run(command)


if __name__ == "__main__":
    main()
