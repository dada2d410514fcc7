"""Instances that lie: each is contained, reported and survived, and every turn comes out as it
should.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from harness.live_fleet import BASE, BASE_VERSION, JOB, FleetPlan, LiveFleet
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.model.ids import InstanceId, TrajectoryId, TurnId, WorkerId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec
from slackwater.zoo.tiny import make_model

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

LIAR = Path(__file__).with_name("lying_engine.py")
SETTINGS = RolloutSettings(
    stall_s=8.0, lease_s=6.0, watch_every_s=0.1, max_losses_without_progress=50, faults_allowed=0
)
# how it lies -> what is reported about it
REPORTED = {
    "foreign_ids": "never dispatched there",
    "too_many": "more than the",
    "miscounts": "tokens of",
    "other_version": "generated with some-other-version",
    "unasked_version": "that was not asked for",
    "wrong_scores": "log-probs for a prompt",
    "silent": "no token for",
    "deaf": "no token for",
}
# how it breaks the protocol -> what ends its connection
DISCONNECTED = {
    "garbage": "the peer is not a worker",
    "oversize": "above the limit",
    "bad_rows": "does not hold",
    "bad_endings": "endings that cannot be read",
    "bad_control": "cannot be read",
    "truncated": "into a frame",
    "mute": "",
}
REFUSED = ("wrong_secret", "no_hello", "same_name")
# These are found out by waiting, so all are waited for at once.
SILENT = ("silent", "deaf", "mute")


def turns(label: str, count: int) -> list[TurnSpec]:
    return [
        TurnSpec(
            TurnId(f"{label}/{number}"),
            TrajectoryId(f"{label}/{number}"),
            JOB,
            (10, 20, 30 + number),
            Sampling(12, seed=number),
            BASE_VERSION,
            base_model=BASE,
        )
        for number in range(count)
    ]


async def liar(fleet: LiveFleet, mode: str, name: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(LIAR),
        mode,
        fleet.floor.connect,
        name,
        env=os.environ | {"SLACKWATER_WORKER_SECRET": fleet.floor.secret},
        stderr=asyncio.subprocess.DEVNULL,
    )


async def until(ready: Callable[[], bool]) -> None:
    while True:
        if ready():
            return
        await asyncio.sleep(0.02)


async def lies(fleet: LiveFleet, modes: Sequence[str], wanted: list[list[int]]) -> None:
    """Liars join beside the honest engine and are given turns; all must come out right, and they
    must go.
    """
    records = fleet.floor.manager.state.instances.records
    names = [InstanceId(mode) for mode in modes]
    processes = [await liar(fleet, mode, name) for mode, name in zip(modes, names, strict=True)]
    label = "+".join(modes)
    try:
        async with asyncio.timeout(240):
            await fleet.until_ready(1 + len(modes))
            asked = asyncio.create_task(fleet.generate(turns(label, 8)))
            if len(modes) > 1:
                await until(lambda: all(records[name].attempts for name in names))
            results = await asked
            await until(lambda: not any(name in records for name in names))
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
    assert [list(result.tokens) for result in results] == wanted, label
    assert any(result.moves for result in results), f"{label}: the liar was given nothing"
    fleet.floor.manager.check_integrity()


def test_turns_survive_every_kind_of_lying_instance(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        make_model("tiny", tmp_path / "model")
        plan = FleetPlan(tmp_path / "model", tmp_path)
        async with asyncio.timeout(560), LiveFleet(plan, SETTINGS) as fleet:
            (honest,) = fleet.provider.start(1)
            await fleet.until_ready(1)
            wanted = [list(result.tokens) for result in await fleet.generate(turns("calm", 8))]
            for mode in (*REPORTED, *DISCONNECTED):
                if mode not in SILENT:
                    await lies(fleet, [mode], wanted)
            await lies(fleet, SILENT, wanted)
            for mode in REFUSED:
                process = await liar(fleet, mode, honest if mode == "same_name" else mode)
                async with asyncio.timeout(240):
                    await process.wait()
            after = await fleet.generate(turns("after", 8))
            assert [list(result.tokens) for result in after] == wanted
            assert fleet.floor.hub.workers() == (WorkerId(honest),)
            assert_all_reported(fleet, caplog.text)

    asyncio.run(scenario())


def assert_all_reported(fleet: LiveFleet, log: str) -> None:
    for mode, said in REPORTED.items():
        lines = [line for line in log.splitlines() if f"instance={mode} " in line]
        assert any(said in line for line in lines), (mode, lines)
    lost = {str(worker): reason for worker, reason in fleet.floor.lost}
    for mode, said in DISCONNECTED.items():
        # A peer that leaves with our words unread resets the connection, and the reset may overtake
        # its last bytes.
        overtaken = mode == "truncated" and ("reset" in lost[mode] or "pipe" in lost[mode])
        assert said in lost[mode] or overtaken, (mode, lost[mode])
    assert "the key of 'wrong_secret' is wrong" in log
    # It says two things that are no proof, which may come together.
    assert "one message at a time" in log or "control message cannot be read" in log
    assert "is connected already" in log
