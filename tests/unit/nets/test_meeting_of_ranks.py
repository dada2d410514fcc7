"""Ranks that meet: one frozen with the rendezvous file's lock does not hold the others."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path

from harness.rank_processes import rank_environment
from slackwater.nets.ranks import RankPlan
from slackwater.weights.plan.layout import Layout

_LIMIT_S = 120.0
_JOIN = """
import os
from slackwater.nets.ranks import RankPlan, Ranks

Ranks.join(RankPlan.from_environment(os.environ))
"""


def test_a_rank_leaves_when_another_keeps_the_rendezvous_locked(tmp_path: Path) -> None:
    meeting = tmp_path / "rendezvous"
    plan = RankPlan(1, Layout.parse("dp=2"), f"file://{meeting}", deadline_s=1.0)
    with meeting.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        ended = subprocess.run(
            [sys.executable, "-c", _JOIN],
            env=os.environ | rank_environment(plan),
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
    assert ended.returncode == 1
    assert b"in join" in ended.stderr
