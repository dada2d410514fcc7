"""Real agents on real sockets: they join, start and end workers, are refused in one line, and come
back.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.model.ids import NodeId, WorkerId
from slackwater.runtime.launch.agents import AgentPlan, JoinAddress
from slackwater.runtime.launch.launch_plan import LaunchPlan
from slackwater.runtime.launch.node_keys import NodeKeys
from slackwater.runtime.launch.nodes import Nodes
from slackwater.runtime.launch.port import WorkerPlan
from slackwater.runtime.net.hub import WorkerHub
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.wire import agent as says
from slackwater.wire import messages
from slackwater.wire.agent import agent_name
from slackwater.wire.certificate import Certificate
from slackwater.wire.frames import Frame

DEADLINE_S = 200.0
NODE = NodeId("a")
ENDS = WorkerPlan("ends", "ending_worker", ())


def _python_path() -> str:
    """So that agents find `lasting_worker` and `ending_worker`."""
    return os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


class Plane:
    """A control plane that knows nodes and nothing else."""

    def __init__(self, folder: Path, encrypted: bool) -> None:
        self.certificate = Certificate.load_or_create(folder) if encrypted else None
        context = self.certificate.context() if self.certificate is not None else None
        self.keys = NodeKeys(StateDirectory(folder))
        self.plan = LaunchPlan(self.keys)
        self.hub = WorkerHub(self.plan, silent_after_s=20.0, context=context)
        self.nodes = Nodes(self.hub, self.plan)
        self.folder = folder
        self.refuses = ""
        self.joins = 0
        self.notices: list[float] = []

    def worker_joined(self, hello: messages.Hello) -> None:
        assert hello.node is not None
        if self.refuses:
            raise ConfigError(self.refuses)
        self.nodes.add(hello.node, 0.0)
        self.joins += 1

    def handle_frames(self, worker: WorkerId, frames: Sequence[Frame]) -> None:
        for frame in frames:
            message = messages.decode_from_worker(frame.body)
            if isinstance(message, says.NodeLeaving):
                self.notices.append(message.leaves_in_s)
            else:
                self.nodes.handle_message(NODE, message)

    def worker_lost(self, worker: WorkerId, reason: str) -> None:
        self.nodes.remove(NODE)

    def join(self, key: str | None = None, pin: str | None = None) -> JoinAddress:
        host, port = self.hub.address
        own = self.certificate.pin if self.certificate is not None else None
        key_of = self.keys.key if key is None else lambda node, pool: key
        return JoinAddress(f"{host}:{port}", "http://127.0.0.1:1", key_of, pin or own)


async def started(
    plane: Plane, join: JoinAddress, *options: str
) -> tuple[asyncio.subprocess.Process, Path]:
    plan = AgentPlan(NODE, f"folder:{plane.folder}", str(plane.folder / "logs"))
    said = plane.folder / "agent.log"
    with said.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *plan.arguments(join), *options),
            stdout=log,
            stderr=log,
            env=os.environ | join.environment(NODE, None) | {"PYTHONPATH": _python_path()},
        )
    return process, said


async def until(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if ready():
                return
            await asyncio.sleep(0.02)


def is_alive(pid: int) -> bool:
    """One that nobody has waited for yet is dead: tests of sandboxes make this process adopt
    orphans, and it does not wait.
    """
    try:
        found = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return found.rpartition(")")[2].split()[0] != "Z"


@asynccontextmanager
async def plane_with_agent(
    folder: Path, encrypted: bool, *options: str
) -> AsyncIterator[tuple[Plane, asyncio.subprocess.Process]]:
    plane = Plane(folder, encrypted)
    await plane.hub.start(plane)
    process, _ = await started(plane, plane.join(), *options)
    try:
        await until(lambda: plane.nodes.names() == (NODE,))
        yield plane, process
    finally:
        await plane.hub.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("encrypted", [False, True])
def test_an_agent_starts_workers_and_says_how_they_ended(tmp_path: Path, encrypted: bool) -> None:
    async def scenario() -> None:
        async with plane_with_agent(tmp_path, encrypted) as (plane, _):
            process = await plane.nodes.spawn(NODE, ENDS, WorkerId("ends.1"))
            assert process.pid > 0
            async with asyncio.timeout(DEADLINE_S):
                assert await process.wait() == 2
            assert "nothing to do" in (tmp_path / "logs" / "ends.log").read_text()

    asyncio.run(scenario())


def test_a_killed_agent_has_no_workers_any_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with plane_with_agent(tmp_path, False) as (plane, agent):
            lasting = WorkerPlan("lasting", "lasting_worker", ())
            process = await plane.nodes.spawn(NODE, lasting, WorkerId("lasting.1"))
            agent.send_signal(signal.SIGKILL)
            async with asyncio.timeout(DEADLINE_S):
                assert await process.wait() == -signal.SIGKILL
            await until(lambda: not is_alive(process.pid))
            with pytest.raises(UnavailableError, match="node a: is not here"):
                await plane.nodes.spawn(NODE, ENDS, WorkerId("ends.1"))

    asyncio.run(scenario())


def handles_sigterm(pid: int) -> bool:
    (line,) = [
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in line
    ]
    return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("dismissed", [True, False])
def test_an_evicted_agent_tells_the_control_plane_and_keeps_its_workers_meanwhile(
    tmp_path: Path, dismissed: bool
) -> None:
    async def scenario() -> None:
        options = ("--redial", "--notice-s", "600" if dismissed else "0.2")
        async with plane_with_agent(tmp_path, False, *options) as (plane, agent):
            lasting = WorkerPlan("lasting", "lasting_worker", ())
            process = await plane.nodes.spawn(NODE, lasting, WorkerId("lasting.1"))
            await until(lambda: handles_sigterm(process.pid))
            for pid in (process.pid, agent.pid):  # a batch scheduler warns the whole tree
                os.kill(pid, signal.SIGTERM)
            await until(lambda: len(plane.notices) == 1)
            if dismissed:
                assert is_alive(process.pid) and agent.returncode is None
                plane.hub.send(agent_name(NODE), messages.Stop())
            async with asyncio.timeout(DEADLINE_S):
                assert await agent.wait() == os.EX_TEMPFAIL
            await until(lambda: not is_alive(process.pid))
            assert plane.notices == [600.0 if dismissed else 0.2]

    asyncio.run(scenario())


def test_an_agent_that_lost_its_connection_dials_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with plane_with_agent(tmp_path, True, "--redial") as (plane, _):
            plane.hub.hang_up(agent_name(NODE))
            await until(lambda: plane.nodes.names() == ())
            await until(lambda: plane.nodes.names() == (NODE,))

    asyncio.run(scenario())


def test_a_worker_with_a_grace_period_is_adopted_when_its_agent_returns(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with plane_with_agent(tmp_path, False) as (plane, _):
            kept = WorkerPlan("kept", "lasting_worker", (), grace_s=300.0)
            other = WorkerPlan("other", "lasting_worker", ())
            process = await plane.nodes.spawn(NODE, kept, WorkerId("kept.3"))
            ended = await plane.nodes.spawn(NODE, other, WorkerId("other.1"))
            key = plane.plan.key_of(messages.ConnectRequest("kept.3", b""))
            plane.hub.hang_up(agent_name(NODE))
            await until(lambda: plane.joins == 2 and plane.nodes.names() == (NODE,))
            assert plane.plan.key_of(messages.ConnectRequest("kept.3", b"")) is None
            assert plane.nodes.adopt(NODE, other) is None and not is_alive(ended.pid)
            adopted = plane.nodes.adopt(NODE, kept)
            assert adopted is not None and adopted.worker == "kept.3"
            assert adopted.pid == process.pid and is_alive(process.pid)
            assert plane.plan.key_of(messages.ConnectRequest("kept.3", b"")) == key
            adopted.kill()
            async with asyncio.timeout(DEADLINE_S):
                assert await adopted.wait() == -signal.SIGKILL

    asyncio.run(scenario())


def test_a_worker_of_another_configuration_is_not_adopted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with plane_with_agent(tmp_path, False) as (plane, _):
            for name in ("changed", "gone"):
                plan = WorkerPlan(name, "lasting_worker", (), grace_s=300.0)
                await plane.nodes.spawn(NODE, plan, WorkerId(f"{name}.1"))
            processes = list(plane.nodes._nodes[NODE].processes.values())
            plane.hub.hang_up(agent_name(NODE))
            await until(lambda: plane.joins == 2 and plane.nodes.names() == (NODE,))
            plane.nodes.end_unplanned(NODE, {"changed"})
            plan = WorkerPlan("changed", "lasting_worker", ("--more",), grace_s=300.0)
            found = plane.nodes.adopt(NODE, plan)
            assert found is not None
            async with asyncio.timeout(DEADLINE_S):
                assert await found.wait() == -signal.SIGKILL
            await until(lambda: not any(is_alive(process.pid) for process in processes))

    asyncio.run(scenario())


def test_an_agent_ends_its_workers_and_itself_when_their_grace_period_is_over(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with plane_with_agent(tmp_path, False) as (plane, agent):
            plan = WorkerPlan("kept", "lasting_worker", (), grace_s=1.5)
            process = await plane.nodes.spawn(NODE, plan, WorkerId("kept.1"))
            accepting = plane.hub._accepting
            assert accepting is not None
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
            began_s = asyncio.get_running_loop().time()
            plane.hub.hang_up(agent_name(NODE))
            async with asyncio.timeout(DEADLINE_S):
                assert await agent.wait() == 1
            assert asyncio.get_running_loop().time() - began_s >= 1.4
            await until(lambda: not is_alive(process.pid))

    asyncio.run(scenario())


def test_a_wrong_secret_and_a_wrong_certificate_are_refused_in_one_line(tmp_path: Path) -> None:
    async def scenario() -> None:
        plane = Plane(tmp_path, encrypted=True)
        await plane.hub.start(plane)
        try:
            for join, said in (
                (plane.join(key="guessed"), "the key of 'agent:a' is wrong"),
                (plane.join(pin="0" * 64), "certificate is not the fleet's"),
            ):
                process, log = await started(plane, join)
                async with asyncio.timeout(DEADLINE_S):
                    assert await process.wait() == 1
                last = log.read_text().splitlines()[-1]
                assert said in last
            assert plane.nodes.names() == ()
        finally:
            await plane.hub.close()

    asyncio.run(scenario())


def test_an_agent_that_the_fleet_has_no_place_for_says_why_and_does_not_dial_again(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        plane = Plane(tmp_path, encrypted=False)
        plane.refuses = "node a: pool: 'gpu' is not a pool of the fleet; there are: mixed"
        await plane.hub.start(plane)
        try:
            process, log = await started(plane, plane.join(), "--redial")
            async with asyncio.timeout(DEADLINE_S):
                assert await process.wait() == 1
            assert plane.refuses in log.read_text().splitlines()[-1]
        finally:
            await plane.hub.close()

    asyncio.run(scenario())


def test_an_agent_whose_old_connection_is_not_known_to_be_dead_tries_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with plane_with_agent(tmp_path, False) as (plane, first):
            second, log = await started(plane, plane.join(), "--redial")
            try:
                await until(lambda: "is connected already; trying again" in log.read_text())
                first.kill()
                await first.wait()
                await until(lambda: plane.joins == 2 and plane.nodes.names() == (NODE,))
                assert second.returncode is None
            finally:
                second.kill()
                await second.wait()

    asyncio.run(scenario())


def test_a_revoked_node_is_refused_and_a_new_token_lets_it_in_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with plane_with_agent(tmp_path, False) as (plane, agent):
            old = plane.keys.key(NODE, None)
            plane.keys.revoke(NODE)
            plane.hub.hang_up(agent_name(NODE))
            async with asyncio.timeout(DEADLINE_S):
                await agent.wait()
                process, log = await started(plane, plane.join(key=old), "--redial")
                assert await process.wait() == 1
            assert "the key of 'agent:a' is wrong" in log.read_text().splitlines()[-1]
            again, _ = await started(plane, plane.join())
            try:
                await until(lambda: plane.nodes.names() == (NODE,))
            finally:
                again.kill()
                await again.wait()

    asyncio.run(scenario())


def environment_of(pid: int) -> dict[str, str]:
    whole = Path(f"/proc/{pid}/environ").read_bytes().decode()
    return dict(line.partition("=")[::2] for line in whole.split("\0") if line)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_an_agent_starts_a_rank_on_each_device_and_ends_all_when_one_ends(tmp_path: Path) -> None:
    ids = [f"{number}" for number in range(8)]

    async def scenario() -> None:
        options = ("--gpu-ids", ",".join(ids))
        async with plane_with_agent(tmp_path, False, *options) as (plane, agent):
            (facts,) = [node.facts for node in plane.nodes._nodes.values()]
            gpus = [device for device in facts.devices if device.kind == "cuda"]
            assert [gpu.device for gpu in gpus] == [f"a/cuda:{number}" for number in ids]
            before = set(children_of(agent.pid))
            plan = WorkerPlan(
                "lasting", "lasting_worker", (), layout="tp=2,dp=2", devices=tuple(gpus[4:])
            )
            process = await plane.nodes.spawn(NODE, plan, WorkerId("lasting.1"))
            ranks = set(children_of(agent.pid)) - before
            told = sorted(map(environment_of, ranks), key=lambda one: one["SLACKWATER_RANK"])
            assert [one["CUDA_VISIBLE_DEVICES"] for one in told] == ids[4:]
            assert [one["SLACKWATER_RANK"] for one in told] == ["0", "1", "2", "3"]
            assert {one["SLACKWATER_WORLD_SIZE"] for one in told} == {"4"}
            assert {one["SLACKWATER_LAYOUT"] for one in told} == {"tp=2,dp=2"}
            (meeting,) = {one["SLACKWATER_RENDEZVOUS"] for one in told}
            assert meeting == f"file://{tmp_path}/logs/lasting.1.rendezvous"
            os.kill(max(ranks), signal.SIGKILL)
            async with asyncio.timeout(DEADLINE_S):
                assert await process.wait() == -signal.SIGKILL
            assert not any(is_alive(rank) for rank in ranks)

    asyncio.run(scenario())


def test_a_worker_of_a_slice_of_cores_runs_on_those_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with plane_with_agent(tmp_path, False, "--devices", "2") as (plane, _):
            (facts,) = [node.facts for node in plane.nodes._nodes.values()]
            first, second = (device for device in facts.devices if device.kind == "cpu")
            assert first.cores and second.cores
            plan = WorkerPlan("lasting", "lasting_worker", (), layout="", devices=(second,))
            process = await plane.nodes.spawn(NODE, plan, WorkerId("lasting.1"))
            assert os.sched_getaffinity(process.pid) == set(second.cores)
            assert "SLACKWATER_RANK" not in environment_of(process.pid)

    asyncio.run(scenario())
