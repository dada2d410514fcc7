"""Agents of this machine: how often one has ended, and addresses that they are told."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from slackwater.model.ids import NodeId
from slackwater.runtime.launch import agents
from slackwater.runtime.launch.agents import AgentLauncher, AgentPlan, JoinAddress, LocalAgents
from slackwater.weights.relay.bucket_store import BucketStore
from slackwater.weights.relay.server import RelayServer
from slackwater.worker.process import address_of

JOIN = JoinAddress("127.0.0.1:9", "127.0.0.1:9", lambda node, pool: "s")


def test_an_agent_that_ends_again_and_again_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "_command", lambda plan, join: ["false"])

    async def scenario() -> None:
        local = LocalAgents(tmp_path)
        local.start([AgentPlan(NodeId("n"), "any", str(tmp_path))], JOIN)
        assert local.deaths(NodeId("n")) == 0
        async with asyncio.timeout(60):
            while True:
                if local.deaths(NodeId("n")) == 3:
                    break
                await asyncio.sleep(0.01)
        await local.close()
        assert AgentLauncher().deaths(NodeId("n")) is None

    asyncio.run(scenario())


def test_an_agent_that_ends_while_its_service_stops_is_neither_reported_nor_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started, stop = tmp_path / "started", tmp_path / "stop"
    wait = f"echo >> {started}; until [ -e {stop} ]; do sleep 0.01; done"
    monkeypatch.setattr(agents, "_command", lambda plan, join: ["sh", "-c", wait])

    async def scenario() -> None:
        local = LocalAgents(tmp_path)
        local.start([AgentPlan(NodeId("n"), "any", str(tmp_path))], JOIN)
        async with asyncio.timeout(60):
            while True:
                if started.exists() and local._processes:
                    break
                await asyncio.sleep(0.01)
        (process,) = local._processes.values()
        local.stop_restarts()
        stop.touch()  # as the hub tells it before the launcher closes
        async with asyncio.timeout(60):
            await process.wait()
        await local.close()

    asyncio.run(scenario())
    assert started.read_text() == "\n"
    assert "agent ended" not in caplog.text


def test_an_ipv6_address_is_told_in_brackets_and_can_be_listened_on() -> None:
    assert address_of("[::1]:20100") == ("::1", 20100)
    with closing(RelayServer(BucketStore(1 << 20), b"s" * 32, host="::1")) as server:
        assert server.address[0] == "::1"
