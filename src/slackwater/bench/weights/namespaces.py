"""A small network of namespaces: a sender behind a slow link, receivers on a fast one. All of it goes away again."""

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType

from slackwater.model.errors import RefusedError


@dataclass(frozen=True, slots=True)
class Site:
    """The names of the namespaces and the addresses in them."""

    sender: str
    sender_host: str
    receivers: tuple[tuple[str, str], ...]


def may_make_namespaces() -> bool:
    """Whether this process may make network namespaces and shape links."""
    if os.name != "posix" or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    name = f"sw{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode:
        return False
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return True


@contextmanager
def slow_site(receivers: int, rate_mbit: int) -> Iterator[Site]:
    """A bridge with `receivers` namespaces on it at full speed, and a sender whose link is shaped."""
    tag = f"sw{os.getpid()}"
    hub = f"{tag}hub"
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, _leave)  # so that all of it goes away then too
            stack.callback(signal.signal, signal.SIGTERM, before)

        def namespace(name: str) -> None:
            _run("ip", "netns", "add", name)
            stack.callback(
                subprocess.run, ["ip", "netns", "del", name], capture_output=True, check=False
            )
            _run("ip", "-n", name, "link", "set", "lo", "up")

        def attach(name: str, number: int) -> str:
            """A cable from a namespace to the bridge; the address of its end."""
            host = f"10.213.{os.getpid() % 200}.{number + 1}"
            outer, inner = f"{tag}p{number}"[-15:], f"{tag}e{number}"[-15:]
            _run(
                "ip",
                "-n",
                hub,
                "link",
                "add",
                outer,
                "type",
                "veth",
                "peer",
                "name",
                inner,
                "netns",
                name,
            )
            _run("ip", "-n", hub, "link", "set", outer, "master", "br0", "up")
            _run("ip", "-n", name, "addr", "add", f"{host}/24", "dev", inner)
            _run("ip", "-n", name, "link", "set", inner, "up")
            if number == 0:
                for where, device in ((name, inner), (hub, outer)):
                    _run(
                        "tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf",
                        "rate", f"{rate_mbit}mbit", "burst", "256kb", "latency", "100ms",
                    )  # fmt: skip
            return host

        namespace(hub)
        _run("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "br0", "up")
        names = [f"{tag}n{number}" for number in range(receivers + 1)]
        for name in names:
            namespace(name)
        hosts = [attach(name, number) for number, name in enumerate(names)]
        yield Site(names[0], hosts[0], tuple(zip(names[1:], hosts[1:], strict=True)))


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    raise SystemExit(128 + number)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RefusedError(f"network: {' '.join(command)}: {done.stderr.strip()}")
