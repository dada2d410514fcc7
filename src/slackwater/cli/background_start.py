"""`slackwater up --background`: start the service detached and wait until it is usable."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from slackwater.cli.running_service import wait_until_serving
from slackwater.cli.status import ask_status
from slackwater.cli.status_screen import format_names
from slackwater.model.errors import RefusedError, SlackwaterError, UnavailableError
from slackwater.runtime.store.state_directory import StateDirectory

STOP_HINT = "stop with Ctrl-C, or `slackwater down` from elsewhere"
_START_S = 120.0
_WORKERS_S = 240.0  # a first start compiles
_POLL_S = 0.2


def entries(root: Path) -> frozenset[str] | None:
    """The names in a folder; None if it does not exist."""
    return frozenset(path.name for path in root.iterdir()) if root.is_dir() else None


@contextlib.contextmanager
def removing_failed_start(root: Path) -> Iterator[StateDirectory]:
    """Lock the folder; unless the service comes up, remove the files that it created."""
    before = entries(root)
    folder = StateDirectory(root)
    folder.lock()
    try:
        yield folder
    finally:
        came_up = (folder.read_server() or {}).get("pid") == os.getpid()
        if not came_up:
            remove_new(root, before)
        folder.unlock()


def remove_new(root: Path, before: frozenset[str] | None) -> None:
    """Remove new entries of the folder, and a new folder itself. The caller holds the lock."""
    gained = (entries(root) or frozenset()) - (before or frozenset())
    # The lock goes last: it keeps other services out.
    for name in sorted(gained, key=lambda name: name == "lock"):
        path = root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if before is None:
        with contextlib.suppress(OSError):
            root.rmdir()


def start_in_background(root: Path) -> int:
    """Start the service, print its announcement, and wait for its workers."""
    before = entries(root)
    folder = StateDirectory(root)
    if folder.is_locked():
        folder.lock()  # raises, and names the holder
    arguments = [argument for argument in sys.argv[1:] if argument != "--background"]
    folder.logs.mkdir(parents=True, exist_ok=True)
    output = folder.logs / "up.log"
    output.unlink(missing_ok=True)  # a log of an older version may be readable by other users
    with output.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "slackwater", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        server = _wait_until_serving(folder, process, output, before)
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C and SIGTERM
        process.terminate()
        process.wait()
        _remove(folder, before)
        raise
    print(output.read_text().replace(STOP_HINT, _stop_hint(root)), end="", flush=True)
    _wait_for_workers(server, process, output)
    return 0


def _stop_hint(root: Path) -> str:
    from slackwater.cli.up_options import DEFAULT_STATE

    own = root != DEFAULT_STATE.expanduser().resolve()
    return f"stop with `slackwater down{f' --state {root}' if own else ''}`"


def _wait_until_serving(
    folder: StateDirectory,
    process: subprocess.Popen[bytes],
    output: Path,
    before: frozenset[str] | None,
) -> dict[str, Any]:
    if (server := wait_until_serving(folder, process, _START_S)) is not None:
        return server
    if process.poll() is None:
        process.terminate()
        raise RefusedError(f"the service was not ready after {_START_S:.0f} s; see {output}")
    output_text = output.read_text().strip()
    _remove(folder, before)
    errors = [line for line in output_text.splitlines() if line.startswith("slackwater: ")]
    reason = errors[-1].removeprefix("slackwater: ") if errors else output_text
    raise RefusedError(f"the service did not start: {reason}")


def _remove(folder: StateDirectory, before: frozenset[str] | None) -> None:
    """Remove what the failed start created, unless another process uses the folder."""
    try:
        folder.lock()
    except SlackwaterError:
        return
    remove_new(folder.root, before)
    folder.unlock()


def _wait_for_workers(
    server: dict[str, Any], process: subprocess.Popen[bytes], output: Path
) -> None:
    """Wait until every worker is up or has failed, and report it."""
    console = Console(stderr=True)
    deadline_s = time.monotonic() + _WORKERS_S
    found: dict[str, Any] = {"starting": ["workers"], "problems": []}
    with console.status("starting workers") as shown:
        while found["starting"] and time.monotonic() < deadline_s:
            try:
                found = ask_status(server)
            except UnavailableError:
                if process.poll() is not None:
                    why = f"the service ended while it started; see {output}"
                    raise UnavailableError(why) from None
            shown.update(f"starting {format_names(found['starting'])}")
            time.sleep(_POLL_S if found["starting"] else 0)
    for problem in found["problems"]:
        print(f"slackwater: {problem}", file=sys.stderr)
    if found["starting"]:
        names = format_names(found["starting"])
        print(f"still starting: {names}; `slackwater status` shows when they are up")
    elif not found.get("nodes"):
        print("ready for nodes to join; `slackwater node token NODE --pool POOL` prints a token")
    elif not found["problems"]:
        print("ready: every worker is up")
