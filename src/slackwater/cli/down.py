"""`slackwater down`: stop the service of a state directory."""

import contextlib
import os
import signal
import time
from typing import Annotated

import typer

from slackwater.cli.running_service import State
from slackwater.cli.up_options import DEFAULT_STATE
from slackwater.model.errors import UnavailableError

app = typer.Typer(add_completion=False)


@app.command()
def down(
    state: State = DEFAULT_STATE,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait for its end.")] = 30.0,
) -> int:
    """Stop the service and wait for its end; its state is kept."""
    from slackwater.runtime.store.state_directory import StateDirectory

    folder = StateDirectory(state, make=False)
    pid = folder.holder()
    if pid is None:
        print(f"no service is running on {folder.root}")
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline_s = time.monotonic() + timeout_s
    while folder.is_locked():
        if time.monotonic() > deadline_s:
            raise UnavailableError(
                f"the service (pid {pid}) is still stopping after {timeout_s:g} s"
            )
        time.sleep(0.05)
    print("stopped")
    return 0
