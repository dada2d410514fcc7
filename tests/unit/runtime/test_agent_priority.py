"""Agents on cores of this machine give way to the control plane that starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

# A control plane's process, which starts one agent and says how both are scheduled.
STARTS_ONE = """
import asyncio, json, os, sys
from pathlib import Path
from slackwater.model.ids import NodeId
from slackwater.runtime.launch.agents import AgentPlan, JoinAddress, LocalAgents

def nice_of_session(pid):
    try:
        return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
    except (FileNotFoundError, IndexError):  # no group scheduling here
        return None

async def main():
    agents = LocalAgents(Path(sys.argv[1]))
    cores = (min(os.sched_getaffinity(0)),)
    join = JoinAddress("127.0.0.1:9", "127.0.0.1:9", lambda node, pool: "s")
    agents.start([AgentPlan(NodeId("n"), "any", sys.argv[1], cores=cores)], join)
    async with asyncio.timeout(60):
        while not agents._processes:
            await asyncio.sleep(0.01)
        pid = agents._processes[NodeId("n")].pid
        while sorted(os.sched_getaffinity(pid)) != list(cores):
            await asyncio.sleep(0.01)
    print(json.dumps({
        "own session": os.getsid(pid) == pid,
        "batch": os.sched_getscheduler(pid) == os.SCHED_BATCH,
        "lower": os.getpriority(os.PRIO_PROCESS, pid) - os.nice(0),
        "sessions": [nice_of_session("self"), nice_of_session(pid)],
    }))
    await agents.close(grace_s=0.1)

asyncio.run(main())
"""


def test_an_agent_on_cores_of_this_machine_has_a_session_of_its_own_that_comes_last(
    tmp_path: Path,
) -> None:
    told = subprocess.run(
        [sys.executable, "-c", STARTS_ONE, str(tmp_path)],
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told.returncode == 0, told.stderr[-2000:]
    found = json.loads(told.stdout)
    mine, agents = found.pop("sessions")
    assert found == {"own session": True, "batch": True, "lower": 5}
    assert mine in (-10, 0, None)  # 0: the system does not allow it
    # The kernel lets who is not root change this ten times a second, all of them together.
    assert agents in ((10, None) if os.geteuid() == 0 else (10, 0, None))
