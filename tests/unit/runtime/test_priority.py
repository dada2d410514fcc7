"""Who gives way to whom."""

import json
import os
import subprocess
import sys

import pytest

from slackwater.runtime.priority import UninterruptedSection

# What a new process says of itself: how it is scheduled, and how its session is. A session that
# Linux does not schedule as a group, such as that of a machine's first process, has an empty file.
SAYS = """
import json, os
from pathlib import Path
from slackwater.runtime.priority import come_first, give_way
def session():
    try:
        return int(Path("/proc/self/autogroup").read_text().split()[-1])
    except (FileNotFoundError, IndexError):
        return None
before = os.nice(0), session()
{call}
print(json.dumps([before, (os.nice(0), session())]))
"""
# Ends well if the system lets who calls it raise a priority.
RAISES = "import os; os.setpriority(os.PRIO_PROCESS, 0, -10)"


def nices_around(call: str, *, own_session: bool) -> list[list[int | None]]:
    """Of a new process before and after the call: its own, and its session's, which is None where
    sessions have none.
    """
    told = subprocess.run(
        [sys.executable, "-c", SAYS.format(call=call)],
        start_new_session=own_session,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    nices: list[list[int | None]] = json.loads(told.stdout)
    return nices


def test_a_process_lowers_its_own_priority_and_that_of_its_session() -> None:
    (nice_before, session_before), (nice, session) = nices_around("give_way(7)", own_session=True)
    assert nice_before is not None
    assert nice == min(nice_before + 7, 19)
    if os.geteuid() == 0 and session_before is not None:
        assert (
            session == 7
        )  # who is not root may be told to come again: ten changes a second, of all sessions
    else:
        assert session in (session_before, 7)


def test_who_is_not_to_be_disturbed_leaves_python_s_lock_as_it_was() -> None:
    usual_s = sys.getswitchinterval()
    try:
        for before_s in (0.0002, 0.02):
            sys.setswitchinterval(before_s)
            with pytest.raises(ValueError, match="in the middle"), UninterruptedSection():
                assert sys.getswitchinterval() == pytest.approx(max(before_s, 0.001))
                raise ValueError("in the middle")
            for _ in range(50):
                with UninterruptedSection():
                    pass
            assert sys.getswitchinterval() == pytest.approx(before_s)
    finally:
        sys.setswitchinterval(usual_s)


def test_who_comes_first_raises_its_own_session() -> None:
    (_, session_before), (_, session) = nices_around("come_first()", own_session=True)
    may = subprocess.run(
        [sys.executable, "-c", RAISES], stderr=subprocess.DEVNULL, check=False, timeout=60
    )
    if os.geteuid() == 0 and session_before is not None and may.returncode == 0:
        assert session == -10
    else:
        assert session in (session_before, -10)


def test_who_comes_first_leaves_a_shared_session_as_it_was() -> None:
    (_, session_before), (_, session) = nices_around("come_first()", own_session=False)
    assert session == session_before
