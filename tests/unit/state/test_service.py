"""The state manager over its socket, with a real worker process that is killed."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from state_bodies import PlainBody, part, summed, tiers_of

from slackwater.model.errors import RefusedError, UnavailableError
from slackwater.model.residency import PartRole, StateBudgets, Tier
from slackwater.state.client import StateClient
from slackwater.state.device import DeviceTier
from slackwater.state.manager import StateManager
from slackwater.state.service import StateServer

KB = 1024
WORKER = """
import sys, torch
sys.path.insert(0, sys.argv[3])
from state_bodies import PlainBody, part, summed
from slackwater.state.client import StateClient
from slackwater.state.device import DeviceTier

client = StateClient(sys.argv[1], "doomed", "secret")
tier = DeviceTier(client, "doomed", 1 << 30)
client.attach(tier)
for name in ("saved", "running"):
    parts = [part(name, "w", 4096), part(name, "w", 4096, "moment1")]
    body = PlainBody.of(parts)
    tier.add(name, parts, body)
    with tier.use(name):
        body.change(torch.Generator().manual_seed(7))
        sums = [summed(t) for t in body.tensors.values()]
    if name == "saved":
        tier.evict(name)
        print(*sums, flush=True)
with tier.use("running"):
    print("running", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[StateManager]:
    made = StateManager(StateBudgets(200 * KB, 400 * KB, 0), tmp_path / "disk")
    yield made
    made.close()


@pytest.fixture
def server(manager: StateManager, tmp_path: Path) -> Iterator[StateServer]:
    made = StateServer(manager, tmp_path / "s", "secret")
    yield made
    made.close()


def test_a_workers_death_loses_nothing_that_was_offloaded(
    manager: StateManager, server: StateServer
) -> None:
    here = str(Path(__file__).parent)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WORKER), str(server.path), "-", here],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    sums = [int(number) for number in process.stdout.readline().split()]
    assert process.stdout.readline().strip() == "running"
    os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    process.stdout.close()
    assert process.stdin is not None
    process.stdin.close()
    deadline_s = time.monotonic() + 120
    while "running" in tiers_of(manager) and time.monotonic() < deadline_s:
        time.sleep(0.01)  # the manager hears of the death from the socket
    assert tiers_of(manager) == {"saved": Tier.HOST}  # the other never left the device: it is lost

    client = StateClient(str(server.path), "heir", "secret")
    tier = DeviceTier(client, "heir", 1 << 30)
    client.attach(tier)
    parts = [part("saved", "w", 4096), part("saved", "w", 4096, "moment1")]
    body = PlainBody.of(parts)
    assert tier.add("saved", parts, body) is False
    with tier.use("saved", timeout_s=30.0):
        assert [summed(tensor) for tensor in body.tensors.values()] == sums
        assert body.steps == 1
    client.close()
    tier.close()


def test_two_workers_share_one_device_and_errors_come_as_they_are(
    manager: StateManager, server: StateServer
) -> None:
    clients = [StateClient(str(server.path), f"w{n}", "secret") for n in range(2)]
    tiers, bodies = [], []
    for number, client in enumerate(clients):
        tier = DeviceTier(client, client.name, 1 << 30)
        client.attach(tier)
        parts = [part(f"job{number}", "w", 30 * KB)]
        bodies.append(PlainBody.of(parts))
        tier.add(f"job{number}", parts, bodies[-1])
        tiers.append(tier)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        for number, tier in enumerate(tiers):
            with tier.use(f"job{number}", timeout_s=30.0):
                bodies[number].change(generator)
    assert bodies[0].wrong == bodies[1].wrong == []
    assert bodies[0].steps == bodies[1].steps == 6
    with pytest.raises(RefusedError, match="on the device"):
        tiers[0].add("huge", [part("huge", "w", 60 * KB)], PlainBody.of([]))
    for client, tier in zip(clients, tiers, strict=True):
        client.close()
        tier.close()


def test_two_workers_share_a_base_that_the_host_holds_beside_one_of_them(
    tmp_path: Path,
) -> None:
    manager = StateManager(StateBudgets(110 * KB, 110 * KB, 1 << 20), tmp_path / "disk")
    server = StateServer(manager, tmp_path / "s", "secret")
    base = part("", "base", 20 * KB, "frozen", PartRole.FROZEN, model="base")
    clients, tiers, bodies = [], [], []
    for number in range(2):
        clients.append(StateClient(str(server.path), f"w{number}", "secret"))
        tiers.append(DeviceTier(clients[-1], clients[-1].name, 1 << 30))
        clients[-1].attach(tiers[-1])
        parts = [part(f"job{number}", "w", 6 * KB), base]
        bodies.append(PlainBody.of(parts))
        tiers[-1].add(f"job{number}", parts, bodies[-1], warm=False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        for number, tier in enumerate(tiers):
            with tier.use(f"job{number}", timeout_s=30.0):
                bodies[number].change(generator)
    assert bodies[0].wrong == bodies[1].wrong == []
    assert bodies[0].steps == bodies[1].steps == 4
    for client, tier in zip(clients, tiers, strict=True):
        client.close()
        tier.close()
    server.close()
    manager.close()


def test_a_process_without_the_secret_is_not_heard(server: StateServer) -> None:
    client = StateClient(str(server.path), "stranger", "guess")
    with pytest.raises(UnavailableError):
        client.forget("anything")
    client.close()
