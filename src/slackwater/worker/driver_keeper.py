"""Keeps one driver: starts it, logs its output and exit status, and ends it on request.

    python -m slackwater.worker.driver_keeper FOLDER ATTEMPT LOCK GRACE_S COMMAND...

It outlives the control plane, so that the log and the status are complete when the plane returns.
The lock that it inherits as descriptor LOCK shows whether it is alive. On SIGTERM the driver's
process group gets SIGTERM, and SIGKILL after GRACE_S. If the keeper is killed, the kernel kills the
driver. It imports no third-party package.
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

_POLL_S = 0.1
_DRAIN_S = 1.0
NOT_STARTED = 127


class DriverKeeper:
    """One attempt of one driver."""

    def __init__(self, files: DriverFiles, attempt: int, lock: int, grace_s: float) -> None:
        self._files = files
        self._attempt = attempt
        self._lock = lock
        self._grace_s = grace_s
        self._log = LogWriter(files)
        self._stop_requested_s: float | None = None

    def request_stop(self, number: int, frame: FrameType | None) -> None:
        if self._stop_requested_s is None:
            self._stop_requested_s = time.monotonic()

    def run(self, command: list[str]) -> None:
        output_read, output_write = os.pipe()
        try:
            driver = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output_write,
                stderr=output_write,
                start_new_session=True,
                pass_fds=(self._lock,),
                preexec_fn=partial(_die_with_keeper, os.getpid()),
            )
        except OSError as error:
            self._log.write(f"{command[0]}: {error.strerror}\n".encode())
            self._files.write_exit(Exit(self._attempt, NOT_STARTED))
            return
        os.close(output_write)
        url = os.environ.get("SLACKWATER_URL", "")
        self._files.write_keeper(DriverKeeperRecord(self._attempt, os.getpid(), driver.pid, url))
        status = self._follow(driver, output_read)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(driver.pid, signal.SIGKILL)  # leftover processes of the driver
        self._log.close()
        self._files.write_exit(Exit(self._attempt, status))

    def _follow(self, driver: "subprocess.Popen[bytes]", output_read: int) -> int:
        terminated = killed = False
        ended_s: float | None = None
        has_output = True
        while True:
            if has_output:
                has_output = self._copy_output(output_read)
            else:
                time.sleep(_POLL_S)
            now_s = time.monotonic()
            status = driver.poll()
            if status is not None:
                ended_s = now_s if ended_s is None else ended_s
                # Descendants may keep the pipe open for ever, so it is drained for a moment only.
                if not has_output or now_s - ended_s > _DRAIN_S:
                    return status
                continue
            if self._stop_requested_s is not None and not terminated:
                terminated = _signal(driver.pid, signal.SIGTERM)
            overdue = (
                self._stop_requested_s is not None
                and now_s - self._stop_requested_s > self._grace_s
            )
            if overdue and not killed:
                killed = _signal(driver.pid, signal.SIGKILL)

    def _copy_output(self, output_read: int) -> bool:
        """Log new output; False at its end."""
        ready, _, _ = select.select([output_read], [], [], _POLL_S)
        if not ready:
            return True
        output = os.read(output_read, 1 << 16)
        if output:
            with contextlib.suppress(OSError):  # a full disk costs lines, not the driver
                self._log.write(output)
        return bool(output)


def _signal(group: int, number: signal.Signals) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
    return True


def _die_with_keeper(keeper: int) -> None:
    die_with_parent(signal.SIGKILL)
    if os.getppid() != keeper:  # hazard: the keeper may have died before the call
        os._exit(NOT_STARTED)


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler instead of SIG_IGN, which the driver would inherit."""


def main() -> None:
    folder, attempt, lock, grace_s, *command = sys.argv[1:]
    keeper = DriverKeeper(DriverFiles(Path(folder)), int(attempt), int(lock), float(grace_s))
    signal.signal(signal.SIGTERM, keeper.request_stop)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _ignore)
    keeper.run(command)


if __name__ == "__main__":
    main()
