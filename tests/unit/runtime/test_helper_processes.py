"""Helpers give way to the service, also where processors are shared by session first."""

import subprocess
import sys
from pathlib import Path

import pytest

AUTOGROUP = Path("/proc/self/autogroup")


@pytest.mark.skipif(not AUTOGROUP.is_file(), reason="this kernel does not share by session")
def test_a_helper_lowers_its_own_priority_and_that_of_its_session() -> None:
    code = (
        "import os; from slackwater.runtime.services.helper_processes import give_way; give_way(7);"
        "print(os.nice(0), open('/proc/self/autogroup').read())"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        start_new_session=True,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.split()
    nice_before = int(subprocess.check_output(["nice"], timeout=60))
    assert int(told[0]) == min(nice_before + 7, 19)
    assert told[-2:] == ["nice", "7"]
