"""Who may connect as what: a worker's key holds for its name, role, node and plan, once; claims
beyond the plan are refused.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hub_peer import dial, next_message

from slackwater.model.action import GpuService, ServiceShape
from slackwater.model.errors import RefusedError
from slackwater.model.ids import NodeId, ServiceName, WorkerId
from slackwater.model.uri import Uri, version_uri
from slackwater.runtime.launch.launch_plan import LaunchPlan
from slackwater.runtime.launch.node_keys import NodeKeys
from slackwater.runtime.launch.port import WorkerPlan
from slackwater.runtime.net.hub import WorkerHub
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.wire import lending, messages
from slackwater.wire.agent import NodeFacts
from slackwater.wire.frames import Frame
from slackwater.wire.rewards import RewardFacts
from slackwater.wire.sandbox import SandboxFacts

DEADLINE_S = 60.0
A, B = NodeId("a"), NodeId("b")
ENGINE = WorkerPlan("engine-0", "slackwater.worker.engine_worker", ("--base", "tiny"))
SERVING = WorkerPlan(
    "serving-0", "slackwater.worker.coserving_worker", ("--base", "tiny", "--lend")
)
TRAINER = WorkerPlan("trainer-0", "slackwater.worker.trainer_worker", ())
SANDBOX = WorkerPlan("sandbox-0", "slackwater.worker.sandbox_worker", ("--node", "sandbox-0"))
REWARDS = WorkerPlan(
    "rewards-0",
    "slackwater.worker.reward_worker",
    ("--node", "rewards-0", "--stage", "judge", "slackwater:models/judge"),
)
FACTS = messages.EngineFacts("tiny", 8, 512, 4096, 2)
OFFER = SandboxFacts("sandbox-0", [[0, 1]], 1000, "bubblewrap")
JUDGE = GpuService(ServiceName("judge"), (ServiceShape(1, 1, 0.1),))


class Heard:
    """Who joined."""

    def __init__(self) -> None:
        self.joined: list[str] = []
        self.changed, self.left = asyncio.Event(), asyncio.Event()

    def worker_joined(self, hello: messages.Hello) -> None:
        self.joined.append(hello.worker)
        self.changed.set()

    def handle_frames(self, worker: WorkerId, frames: Sequence[Frame]) -> None:
        """Nothing to keep."""

    def worker_lost(self, worker: WorkerId, reason: str) -> None:
        self.left.set()


class Stage:
    """A hub with a launch plan: a node with two cores, and a worker of every kind about to be
    started on it.
    """

    def __init__(self, folder: Path) -> None:
        self.nodes = NodeKeys(StateDirectory(folder))
        self.plan = LaunchPlan(self.nodes)
        self.heard = Heard()
        self.hub = WorkerHub(self.plan, before_send=self.plan.authorize)
        self.plan.node_joined(NodeFacts("a", cores=2, memory_mb=1000))
        plans = (ENGINE, SERVING, TRAINER, SANDBOX, REWARDS)
        self.keys = {
            plan.name: self.plan.expect(A, plan, WorkerId(f"{plan.name}.1")) for plan in plans
        }

    async def says(self, hello: messages.Hello, key: str, name: str | None = None) -> str:
        """Why a peer is refused; empty if it is let in."""
        reader, _, answer = await dial(self.hub, hello, key, name=name)
        if isinstance(answer, messages.HelloRefused):
            return answer.reason
        refused = asyncio.create_task(next_message(reader))
        joined = asyncio.create_task(self.heard.changed.wait())
        await asyncio.wait([refused, joined], return_when=asyncio.FIRST_COMPLETED)
        self.heard.changed.clear()
        if not refused.done():
            refused.cancel()
            return ""
        joined.cancel()
        found = refused.result()
        assert isinstance(found, messages.HelloRefused)
        return found.reason


def engine(worker: str = "engine-0.1", **changes: object) -> messages.Hello:
    return messages.Hello(worker, "engine", msgspec.structs.replace(FACTS, **changes))


def sandbox(worker: str = "sandbox-0.1", **changes: object) -> messages.Hello:
    offer = msgspec.structs.replace(OFFER, **changes)
    return messages.Hello(worker, "sandbox", sandbox=offer)


def rewards(
    *services: GpuService, node: str = "rewards-0", failed: dict[str, str] | None = None
) -> messages.Hello:
    facts = RewardFacts(node, ["cpu"], 100, list(services), failed or {})
    return messages.Hello("rewards-0.1", "rewards", rewards=facts)


def run(folder: Path, hello: messages.Hello, of: str, name: str | None = None) -> str:
    """Why the holder of the key of a plan is refused who says this."""

    async def scenario() -> str:
        stage = Stage(folder)
        await stage.hub.start(stage.heard)
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await stage.says(hello, stage.keys[of], name)
        finally:
            await stage.hub.close()

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("hello", "of"),
    [
        (engine(), "engine-0"),
        (engine(node="a"), "engine-0"),
        (engine("serving-0.1", lends=True), "serving-0"),
        (messages.Hello("trainer-0.1", "trainer"), "trainer-0"),
        (sandbox(), "sandbox-0"),
        (rewards(JUDGE), "rewards-0"),
        (rewards(failed={"judge": "it is torn"}), "rewards-0"),
    ],
)
def test_what_is_planned_is_let_in(tmp_path: Path, hello: messages.Hello, of: str) -> None:
    assert run(tmp_path, hello, of) == ""


@pytest.mark.parametrize(
    ("hello", "of", "why"),
    [
        # The key of one worker under the name of another, or of nobody.
        (sandbox(), "engine-0", "the key of 'sandbox-0.1' is wrong"),
        (engine("engine-1.1"), "engine-0", "the key of 'engine-1.1' is wrong"),
        (engine("engine-0.2"), "engine-0", "the key of 'engine-0.2' is wrong"),
        (messages.Hello("agent:a", "agent", node=NodeFacts("a")), "engine-0", "is wrong"),
        # Another role than planned.
        (sandbox("engine-0.1"), "engine-0", "role: 'sandbox' must be 'engine'"),
        (messages.Hello("engine-0.1", "agent", node=NodeFacts("a")), "engine-0", "role: 'agent'"),
        (messages.Hello("trainer-0.1", "trainer", sandbox=OFFER), "trainer-0", "what a trainer is"),
        (messages.Hello("engine-0.1", "engine", FACTS, sandbox=OFFER), "engine-0", "an? engine is"),
        # More than planned, or something else.
        (sandbox(cores=[list(range(64))]), "sandbox-0", "cores: 64 is more than node a has: 2"),
        (sandbox(memory_mib=1001), "sandbox-0", "memory_mib: 1001 is more than node a has"),
        (sandbox(node="b.sandbox-0"), "sandbox-0", "node: 'b.sandbox-0' must be 'sandbox-0'"),
        (engine(base_model="other"), "engine-0", "base_model: 'other' must be 'tiny'"),
        (engine(kind="local"), "engine-0", "kind: 'local' must be 'dedicated'"),
        (engine(kind="borrowed", job="me/x"), "engine-0", "kind: 'borrowed'"),
        (engine(job="me/x"), "engine-0", "job: 'me/x' must be None"),
        (engine(node="b"), "engine-0", "node: 'b' must be 'a'"),
        (engine(lends=True), "engine-0", "lends: True must be False"),
        (rewards(JUDGE, GpuService(ServiceName("x"), JUDGE.degrees)), "rewards-0", "services: "),
        (rewards(JUDGE, node="b"), "rewards-0", "node: 'b' must be 'rewards-0'"),
        (engine("serving-0.1~1", kind="borrowed", job="j"), "serving-0", "was not told to lend"),
        (engine("engine-0.1~1", kind="borrowed", job="j"), "engine-0", "was not told to lend"),
    ],
)
def test_what_is_not_planned_is_refused_in_one_line(
    tmp_path: Path, hello: messages.Hello, of: str, why: str
) -> None:
    said = run(tmp_path, hello, of)
    assert why.replace("an? ", "a ") in said
    assert "\n" not in said


def test_the_log_alone_tells_a_worker_that_is_not_expected_yet_from_one_with_a_wrong_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(tmp_path, engine("engine-0.2"), "engine-0").endswith("'engine-0.2' is wrong")
    assert "'engine-0.2' waits for its node's agent" in caplog.text
    caplog.clear()
    assert run(tmp_path, sandbox(), "engine-0").endswith("'sandbox-0.1' is wrong")
    assert "the key of 'sandbox-0.1' is wrong" in caplog.text


def test_an_engine_cannot_take_another_workers_name_after_its_proof(tmp_path: Path) -> None:
    said = run(tmp_path, engine("serving-0.1"), "engine-0", name="engine-0.1")
    assert "engine-0.1 says that it is 'serving-0.1'" in said


def test_a_key_holds_once_and_not_after_its_process_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        stage = Stage(tmp_path)
        await stage.hub.start(stage.heard)
        try:
            async with asyncio.timeout(DEADLINE_S):
                key = stage.keys["engine-0"]
                assert await stage.says(engine(), key) == ""
                stage.hub.hang_up(WorkerId("engine-0.1"))
                await stage.heard.left.wait()
                assert "its key holds once" in await stage.says(engine(), key)
                stage.plan.forget(WorkerId("engine-0.1"))
                assert "is wrong" in await stage.says(engine(), key)
        finally:
            await stage.hub.close()

    asyncio.run(scenario())


def test_a_worker_that_was_told_to_lend_joins_for_that_job_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        stage = Stage(tmp_path)
        await stage.hub.start(stage.heard)
        try:
            async with asyncio.timeout(DEADLINE_S):
                key = stage.keys["serving-0"]
                assert await stage.says(engine("serving-0.1", lends=True), key) == ""
                told = lending.LendNode("me/x", "policy", "base:policy", "slackwater:models/policy")
                stage.hub.send(WorkerId("serving-0.1"), told)
                loan = {"kind": "borrowed", "base_model": "policy"}
                other = engine("serving-0.1~1", **loan, job="you/x")
                assert "job: 'you/x' must be 'me/x'" in await stage.says(other, key)
                assert await stage.says(engine("serving-0.1~1", **loan, job="me/x"), key) == ""
        finally:
            await stage.hub.close()

    asyncio.run(scenario())


def test_the_sandboxes_of_a_node_share_what_the_node_has(tmp_path: Path) -> None:
    async def scenario() -> None:
        stage = Stage(tmp_path)
        second = WorkerPlan("sandbox-1", SANDBOX.module, ("--node", "sandbox-1"))
        keys = stage.keys | {"sandbox-1": stage.plan.expect(A, second, WorkerId("sandbox-1.1"))}
        await stage.hub.start(stage.heard)
        try:
            async with asyncio.timeout(DEADLINE_S):
                first = sandbox(cores=[[0]], memory_mib=500)
                assert await stage.says(first, keys["sandbox-0"]) == ""
                greedy = sandbox("sandbox-1.1", node="sandbox-1", memory_mib=500)
                said = await stage.says(greedy, keys["sandbox-1"])
                assert "cores: 3 is more than node a has: 2" in said
        finally:
            await stage.hub.close()

    asyncio.run(scenario())


def test_a_node_key_is_for_one_node_of_one_pool(tmp_path: Path) -> None:
    keys = NodeKeys(StateDirectory(tmp_path))
    made = {keys.key(node, pool) for node in ("a", "b") for pool in (None, "gpu", "cpu")}
    assert len(made) == 6
    assert StateDirectory(tmp_path).fleet_secret() not in made
    assert keys.key("a", "gpu") == NodeKeys(StateDirectory(tmp_path)).key("a", "gpu")

    async def scenario() -> list[str]:
        stage = Stage(tmp_path / "plane")
        await stage.hub.start(stage.heard)
        try:
            async with asyncio.timeout(DEADLINE_S):
                key = stage.nodes.key("a", "gpu")
                return [
                    await stage.says(messages.Hello(f"agent:{proved}", "agent", node=facts), key)
                    for proved, facts in (
                        ("b", NodeFacts("b", "gpu")),
                        ("a", NodeFacts("a", "cpu")),
                        ("a", NodeFacts("a", "gpu", certificate="-----BEGIN CERTIFICATE-----")),
                        ("a", NodeFacts("a", "gpu")),
                    )
                ]
        finally:
            await stage.hub.close()

    other_node, other_pool, no_certificate, planned = asyncio.run(scenario())
    assert "the key of 'agent:b' is wrong" in other_node
    assert "the key of 'agent:a' is wrong" in other_pool
    assert no_certificate.startswith("certificate: '-----BEGIN")
    assert planned == ""


def test_a_worker_may_use_what_it_was_told_last_and_the_model_that_it_was_started_with(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path)
    worker = stage.plan.holder_of(stage.keys["rewards-0"])
    assert worker is not None
    names = [f"run-{number}" for number in range(2000)]
    for name in names:
        stage.plan.authorize(worker.worker, messages.PullVersion(name))
        stage.plan.authorize(
            worker.worker, messages.SaveState(1, "m", f"slackwater:snapshots/{name}")
        )
    assert worker.may_read(version_uri(names[-1])) and not worker.may_read(version_uri(names[0]))
    assert worker.may_read(Uri("models", "judge/config.json"))
    assert not worker.may_read(Uri("models", "other/config.json"))
    assert len(worker.reads) == len(worker.writes) < len(names)
    last = Uri("snapshots", names[-1])
    worker.record_commit(last, "first")
    with pytest.raises(RefusedError, match="already"):
        worker.check_commit(last, "second")
