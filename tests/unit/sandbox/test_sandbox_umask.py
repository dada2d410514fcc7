"""A service that keeps its own files closed still gives actions a world that they can walk through."""

import os

from sandbox_stage import a_stage, bubblewrap_missing

from slackwater.sandbox.choice import BackendName


def test_a_closed_umask_of_the_worker_does_not_close_the_sandbox() -> None:
    before = os.umask(0o077)
    try:
        backend: BackendName = "process" if bubblewrap_missing() else "bubblewrap"
        with a_stage(backend) as stage:
            stage.supervisor.open("e", files={"folder/file": b"here"})
            ran = stage.sh("cat folder/file; python3 -c 'print(1)'; umask")
            assert ran.stdout.split() == ["here1", "0022"]
    finally:
        os.umask(before)
