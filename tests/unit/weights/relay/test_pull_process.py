"""Pulling in a process of its own: what it gives, what is left when either side is killed."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from relay_stage import SECRET
from torch import Tensor

from slackwater.model.errors import NotFoundError, RefusedError, UnavailableError
from slackwater.model.payload import Payload
from slackwater.weights.relay.host_copy import host_version, torch_tensors
from slackwater.weights.relay.node_relay import NodeRelay
from slackwater.weights.relay.publisher import RelayPublisher
from slackwater.weights.relay.pull_process import NICENESS, PullProcess

DEADLINE_S = 120.0
ON_LINUX = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")

CALLER = """
import sys
from slackwater.model.payload import Payload
from slackwater.weights.relay.pull_process import PullProcess
host, port, secret = sys.argv[1:]
pulls = PullProcess((host, int(port)), secret.encode(), node="node", keep=2)
pulls.take("v1", [Payload("v1")], keep=True)
print(pulls.pid, flush=True)
pulls.take("never published", [Payload("never published")], keep=True)
"""


@pytest.fixture(name="stack")
def a_stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(name="relay")
def a_relay(stack: ExitStack) -> NodeRelay:
    relay = NodeRelay(SECRET, "node", "127.0.0.1", 64 << 20, tell=lambda _: None)
    stack.callback(relay.close)
    return relay


@pytest.fixture(name="pulls")
def a_pull_process(stack: ExitStack, relay: NodeRelay) -> PullProcess:
    pulls = PullProcess(relay.address, SECRET, node="node", keep=2)
    stack.callback(pulls.close)
    return pulls


def content(version: int) -> dict[str, Tensor]:
    """Of every version some elements differ from the one before."""
    generator = torch.Generator().manual_seed(1)
    found = {
        "w": torch.randn(300, 400, generator=generator),
        "half": torch.randn(7, 5, generator=generator).to(torch.bfloat16),
        "empty": torch.empty(0, 3),
    }
    found["w"].view(-1)[: 50 * version] += version
    return found


def stocked(stocker: RelayPublisher, number: int) -> None:
    stocker.stock("model", host_version(f"v{number}", content(number), {"lora": None}))


def taken(pulls: PullProcess, number: int, base: str = "") -> dict[str, Tensor]:
    found = pulls.take(f"v{number}", [Payload(f"v{number}", base)], keep=True)
    assert found.meta == {"lora": None}
    return torch_tensors(found)


def started(relay: NodeRelay, pulls: PullProcess) -> int:
    """The process, after its first pull."""
    stocked(RelayPublisher(relay.address, SECRET), 1)
    assert same(taken(pulls, 1), content(1))
    assert pulls.pid is not None
    return pulls.pid


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def until(is_so: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_so():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def kill_when_asked(pid: int, channel: socket.socket) -> None:
    """Kill a process, which is stopped, when a question waits at its end of the channel."""
    until(lambda: fcntl.ioctl(channel, termios.TIOCOUTQ, bytes(4)) != bytes(4))
    os.kill(pid, signal.SIGKILL)


def shared_maps(pid: int | None) -> set[str]:
    """The memory that a process shares, by inode."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "slackwater version" in line}


def loaded(pid: int | None) -> bool:
    """Whether it has become the nice process that waits for its first pull."""
    return pid is not None and os.getpriority(os.PRIO_PROCESS, pid) == NICENESS


def test_the_process_is_ready_before_the_first_pull(pulls: PullProcess) -> None:
    assert until(lambda: loaded(pulls.pid))


def test_whole_then_deltas_and_nothing_that_is_read_is_changed(
    relay: NodeRelay, pulls: PullProcess
) -> None:
    stocker = RelayPublisher(relay.address, SECRET, bucket_bytes=1 << 16)
    stocked(stocker, 1)
    first = taken(pulls, 1)
    assert same(first, content(1))
    stocked(stocker, 2)
    second = taken(pulls, 2, "v1")
    assert same(second, content(2))
    assert same(first, content(1)), "what was given out is changed"
    second["w"].fill_(0)  # its copy there has not changed
    stocked(stocker, 3)
    assert same(taken(pulls, 3, "v2"), content(3))


@ON_LINUX
def test_a_copy_that_nobody_reads_is_changed_where_it_lies(
    relay: NodeRelay, pulls: PullProcess
) -> None:
    stocker = RelayPublisher(relay.address, SECRET)
    stocked(stocker, 1)
    assert same(taken(pulls, 1), content(1))
    memory = shared_maps(pulls.pid)
    assert len(memory) == 1
    for number in (2, 3):
        stocked(stocker, number)
        assert same(taken(pulls, number, f"v{number - 1}"), content(number))
        assert shared_maps(pulls.pid) == memory
    assert not shared_maps(os.getpid()), "memory that nobody reads is still mapped"


@ON_LINUX
def test_a_process_that_is_killed_is_an_error_of_its_pull_and_the_next_pull_has_another(
    relay: NodeRelay, pulls: PullProcess
) -> None:
    stocked(RelayPublisher(relay.address, SECRET), 1)
    first = taken(pulls, 1)
    killed = pulls.pid
    assert killed is not None and pulls._channel is not None
    os.kill(killed, signal.SIGSTOP)
    killer = threading.Thread(target=kill_when_asked, args=(killed, pulls._channel))
    killer.start()
    with pytest.raises(UnavailableError, match="pulled 'v2' ended with -9"):
        pulls.take("v2", [Payload("v2", "v1")], keep=True)
    killer.join()
    assert same(first, content(1)), "what was given out is lost with the process"
    assert same(taken(pulls, 1), content(1))
    assert pulls.pid != killed


@ON_LINUX
def test_a_process_that_was_killed_between_two_pulls_is_replaced_without_an_error(
    relay: NodeRelay, pulls: PullProcess
) -> None:
    killed = started(relay, pulls)
    os.kill(killed, signal.SIGKILL)
    ended = os.WEXITED | os.WNOWAIT | os.WNOHANG  # it stays to be waited for
    assert until(lambda: os.waitid(os.P_PID, killed, ended) is not None)
    assert same(taken(pulls, 1), content(1))
    with pytest.raises(NotFoundError, match="'v0', which 'v1' changes, is not held here"):
        pulls.take("v1", [Payload("v1", "v0")], keep=True)
    assert same(taken(pulls, 1), content(1)), "it does not go on after an error"


@ON_LINUX
def test_when_its_caller_is_killed_the_process_ends_in_the_middle_of_a_pull(
    relay: NodeRelay,
) -> None:
    stocked(RelayPublisher(relay.address, SECRET), 1)
    command = [sys.executable, "-c", CALLER, *map(str, relay.address), SECRET.decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        pid = int(caller.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        caller.kill()
    assert until(lambda: not alive(pid))


def test_who_is_closed_leaves_no_process_and_pulls_no_more(
    relay: NodeRelay, pulls: PullProcess
) -> None:
    pid = started(relay, pulls)
    pulls.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(RefusedError, match="pulls no more"):
        pulls.take("v1", [Payload("v1")], keep=True)
