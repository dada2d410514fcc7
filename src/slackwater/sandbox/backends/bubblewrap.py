"""bubblewrap: namespaces of its own for every action, and a file system in which only the environment can be written.

The machine's programs and libraries are there to read, under their own names; the environment is at /sandbox.
"""

import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from slackwater.sandbox.backends.port import Guarantee, Order, hidden_pythons, variables
from slackwater.sandbox.environment import Environment
from slackwater.sandbox.launch import Launch

HOME = "/sandbox"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    "ssl",
    "ca-certificates",
    "localtime",
    "mime.types",
    "passwd",
    "group",
    "nsswitch.conf",
)
_ETC_NETWORK = ("resolv.conf", "hosts", "services")
_SHARED_MEMORY_BYTES = 256 << 20
_GUARANTEES: frozenset[Guarantee] = frozenset(
    ("foreign files", "neighbours' files", "network", "signals", "leftovers")
)


def find_bubblewrap(user: int | None) -> tuple[str | None, str]:
    """The program, if it runs here (as `user`, if root starts it), or None and why not."""
    program = shutil.which("bwrap")
    if program is None:
        return None, "bwrap is not installed"
    command = [program, "--unshare-user", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/"]
    try:
        tried = subprocess.run(
            [*command, "--proc", "/proc", "--dev", "/dev", "/bin/true"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
            user=user,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"bwrap does not run: {error}"
    if tried.returncode != 0:
        return None, f"bwrap does not run: {tried.stderr.strip()}"
    return program, "bwrap runs"


class BubblewrapBackend:
    """`program` is bwrap's path; with `has_namespaces` its network is made beforehand, else bwrap makes it; `shown` are further folders that actions may read, such as a toolchain."""

    name = "bubblewrap"
    guarantees = _GUARANTEES

    def __init__(
        self, program: str, has_namespaces: bool = False, shown: tuple[Path, ...] = ()
    ) -> None:
        self._has_namespaces = has_namespaces
        pythons = (Path(sys.prefix), Path(sys.base_prefix))
        self._hidden = hidden_pythons()
        self._fixed = [program, "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        self._fixed += ["--unshare-cgroup-try", "--die-with-parent", "--cap-drop", "ALL"]
        self._fixed += ["--hostname", "sandbox", *_readable((*shown, *pythons))]
        self._fixed += ["--proc", "/proc", "--dev", "/dev"]
        self._fixed += ["--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]

    def opened(self, environment: Environment) -> None:
        """Folders are all it needs."""

    def launch(self, environment: Environment, order: Order, rlimits: Mapping[int, int]) -> Launch:
        limits = order.limits
        argv = [*self._fixed]
        if limits.network:
            argv += _bound_etc(_ETC_NETWORK)
        elif not self._has_namespaces:
            argv.append("--unshare-net")
        argv += ["--bind", str(environment.view), HOME, "--bind", str(environment.tmp), "/tmp"]
        argv += ["--symlink", "/tmp", "/var/tmp", "--remount-ro", "/dev", "--remount-ro", "/"]
        return Launch(
            argv=[*argv, "--chdir", HOME, "--", *order.argv],
            variables=variables(order, HOME, "/tmp"),
            folder=environment.view,
            user=environment.user,
            cores=order.cores,
            rlimits={
                **rlimits,
                resource.RLIMIT_FSIZE: limits.disk_bytes,
                resource.RLIMIT_CORE: 0,
            },
            own_network=self._has_namespaces and not limits.network,
            shown=self._hidden if self._has_namespaces else (),
        )

    def ended(self, environment: Environment) -> None:
        """The process namespace of an action ends with it."""

    def closed(self, environment: Environment) -> None:
        """Nothing but folders."""


def _readable(more: tuple[Path, ...]) -> list[str]:
    """The machine's programs; links as links, so that paths look as they do outside."""
    arguments: list[str] = []
    for name in _SYSTEM:
        path = Path(name)
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), name]
        elif path.is_dir():
            arguments += ["--ro-bind", name, name]
    for path in dict.fromkeys(more):
        if path.is_dir() and not str(path).startswith("/usr/"):
            arguments += ["--ro-bind", str(path), str(path)]
    return arguments + _bound_etc(_ETC)


def _bound_etc(names: tuple[str, ...]) -> list[str]:
    arguments: list[str] = []
    for name in names:
        arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return arguments
