"""A service that keeps its own files closed still gives actions a world that they can walk
through.
"""

import os

import pytest
from sandbox_stage import a_stage, bubblewrap_missing

from slackwater.sandbox.choice import BackendName


@pytest.mark.parametrize("backend", ["process", "bubblewrap"])
def test_a_closed_umask_of_the_worker_does_not_close_the_sandbox(backend: BackendName) -> None:
    if backend == "bubblewrap" and (why := bubblewrap_missing()) is not None:
        pytest.skip(f"this machine has no working bubblewrap: {why}")
    before = os.umask(0o077)
    try:
        with a_stage(backend) as stage:
            stage.supervisor.open("e", files={"folder/file": b"here"})
            ran = stage.sh("cat folder/file; python3 -c 'print(1)'; umask")
            assert ran.stdout.split() == ["here1", "0022"]
    finally:
        os.umask(before)
