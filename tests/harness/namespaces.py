"""Hosts of one machine: network namespaces on a bridge, whose links can be shaped and cut. Linux
and root only.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from slackwater.model.errors import RefusedError

_SUBNET = "10.213.{net}"


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace: its name, its address, and the command that runs another command in it."""

    name: str
    address: str
    link: str

    def command(self, *words: str) -> list[str]:
        """The words, run inside."""
        return ["ip", "netns", "exec", self.name, *words]

    def cut(self) -> None:
        """No packet passes any more, and nobody is told."""
        _run("ip", "link", "set", self.link, "down")

    def heal(self) -> None:
        _run("ip", "link", "set", self.link, "up")

    def shape(self, mbit_per_s: float) -> None:
        """Both directions of the host's link, by a token bucket."""
        rate = ("rate", f"{mbit_per_s:g}mbit", "burst", "256kb", "latency", "200ms")
        _run("tc", "qdisc", "replace", "dev", self.link, "root", "tbf", *rate)
        inside = self.command("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate)
        _run(*inside)


@dataclass(frozen=True, slots=True)
class Hosts:
    """A bridge with an address of ours, and the hosts on it."""

    address: str
    hosts: tuple[Host, ...]


def can_make_hosts() -> bool:
    """Whether this process may make network namespaces here."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    name = f"sw{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode:
        return False
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return True


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """So many hosts on a bridge; all of it is gone afterwards, whatever happened."""
    made: list[Host] = []
    before = None
    net = _make_bridge()
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, _leave)
    subnet = _SUBNET.format(net=net)
    bridge = f"swbr{net}"
    try:
        _run("ip", "addr", "add", f"{subnet}.1/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for number in range(count):
            host = Host(f"sw{net}n{number}", f"{subnet}.{number + 10}", f"swv{net}n{number}")
            made.append(host)
            _add(host, bridge)
        yield Hosts(f"{subnet}.1", tuple(made))
    finally:
        for host in made:
            _end_all(host)
            _quietly("ip", "netns", "del", host.name)
            _quietly("ip", "link", "del", host.link)
        _quietly("ip", "link", "del", bridge)
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _make_bridge() -> int:
    """Of the subnets, the number of one that nobody has: its bridge is made by whoever comes
    first.
    """
    for net in random.sample(range(1, 251), 250):
        words = ("ip", "link", "add", f"swbr{net}", "type", "bridge")
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        if not done.returncode:
            return net
        if "File exists" not in done.stderr:
            raise RefusedError(f"network: {' '.join(words)}: {done.stderr.strip()}")
    raise RefusedError("network: every subnet is taken: delete bridges named swbr*")


def _leave(number: int, frame: FrameType | None) -> None:
    """Asked to end: by way of what takes the network away."""
    del frame
    raise SystemExit(128 + number)


def _add(host: Host, bridge: str) -> None:
    _run("ip", "netns", "add", host.name)
    peer = f"{host.link}p"
    _run("ip", "link", "add", host.link, "type", "veth", "peer", "name", peer)
    _run("ip", "link", "set", peer, "netns", host.name)
    _run("ip", "link", "set", host.link, "master", bridge, "up")
    _run(*host.command("ip", "link", "set", peer, "name", "eth0"))
    _run(*host.command("ip", "addr", "add", f"{host.address}/24", "dev", "eth0"))
    _run(*host.command("ip", "link", "set", "eth0", "up"))
    _run(*host.command("ip", "link", "set", "lo", "up"))


def _end_all(host: Host) -> None:
    """Kill what still runs inside."""
    for pid in pids_of(host):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)


def pids_of(host: Host) -> list[int]:
    """Every process inside."""
    found = subprocess.run(
        ["ip", "netns", "pids", host.name], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in found.stdout.split()]


def _run(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RefusedError(f"network: {' '.join(words)}: {done.stderr.strip()}")


def _quietly(*words: str) -> None:
    subprocess.run(words, check=False, capture_output=True)
