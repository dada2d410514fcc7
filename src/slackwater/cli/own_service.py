"""A service that lives as long as the command that starts it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from slackwater.cli.running_service import wait_until_serving
from slackwater.model.errors import UnavailableError
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.sandbox.linux import die_with_parent

START_S = 240.0  # the first start compiles
STOP_S = 30.0


@contextlib.contextmanager
def own_service(
    state: Path, model: str, directory: Path, *options: str
) -> Iterator[tuple[str, str]]:
    """Start a service with one model; yields the URL and the key."""
    with start_service(state, "--model", f"{model}={directory}", *options) as found:
        yield found


@contextlib.contextmanager
def start_service(state: Path, *options: str) -> Iterator[tuple[str, str]]:
    """Run `slackwater up` with these options; yields the URL and the key."""
    folder = StateDirectory(state)
    command = [sys.executable, "-m", "slackwater", "up", "--state", str(folder.root), "--port", "0"]
    log = folder.root / "service.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, *options],
            stdout=output,
            stderr=output,
            # A new session, so that Ctrl-C reaches only this process, which then stops the service.
            start_new_session=True,
            preexec_fn=partial(_end_with, os.getpid()),
        )
        try:
            yield _wait_until_serving(folder, process, log)
        finally:
            _stop(process)


def _end_with(command: int) -> None:
    """Stop the service (SIGTERM) when the thread of the starting command dies."""
    if sys.platform == "linux":
        die_with_parent(signal.SIGTERM)
    if os.getppid() != command:  # it died before the call
        os._exit(1)


def _wait_until_serving(
    folder: StateDirectory, process: subprocess.Popen[bytes], log: Path
) -> tuple[str, str]:
    if (server := wait_until_serving(folder, process, START_S)) is not None:
        return str(server["url"]), str(server["key"])
    how = f"took over {START_S:.0f} s" if process.poll() is None else "ended at once"
    last = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
    raise UnavailableError(f"the service {how}; its log {log} ends:\n{last}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
