"""bubblewrap: namespaces of its own for every environment, and a file system in which only that can be written.

The machine's programs and libraries are there to read, under their own names; the environment is at /sandbox.
"""

import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from slackwater.sandbox.backends.port import Guarantee, Order, variables
from slackwater.sandbox.environment import Environment
from slackwater.sandbox.held import HeldSandbox
from slackwater.sandbox.launch import Launch
from slackwater.sandbox.mounts import COVER_BYTES, SHARED_TMP, has_any, tmp_beside

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
    """`program` is bwrap's path; with `has_namespaces` (root) an environment's namespaces are made once and held, and
    its network is its lane's; else every action has a bwrap of its own. `shown` are further folders that actions may
    read, such as a toolchain."""

    name = "bubblewrap"
    guarantees = _GUARANTEES

    def __init__(
        self, program: str, has_namespaces: bool = False, shown: tuple[Path, ...] = ()
    ) -> None:
        self._holds = has_namespaces
        self._held: dict[tuple[str, bool], HeldSandbox] = {}
        self._shown = tuple(dict.fromkeys((*shown, Path(sys.prefix), Path(sys.base_prefix))))
        self._tmp = tmp_beside(self._shown)
        self._fixed = [program, "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        if not has_namespaces:
            self._fixed.append("--unshare-user")
        self._fixed += ["--unshare-cgroup-try", "--die-with-parent", "--cap-drop", "ALL"]
        self._fixed += ["--hostname", "sandbox", *_system()]
        self._fixed += ["--proc", "/proc", "--dev", "/dev", *_made_above("/var/tmp")]
        for tmp in SHARED_TMP:
            if has_any(tmp, self._shown):
                self._fixed += ["--size", str(COVER_BYTES), "--perms", "1777", "--tmpfs", tmp]
        self._fixed += _readable(self._shown)

    def opened(self, environment: Environment) -> None:
        if self._holds:
            self._hold(environment, network=False)

    def _hold(self, environment: Environment, *, network: bool) -> HeldSandbox:
        """One with a network also has the files that say where it leads."""
        key = (environment.name, network)
        if key in self._held and self._held[key].is_lost:
            self._held.pop(key).close()
        if key not in self._held:
            argv = self._argv(environment, network=network)
            self._held[key] = HeldSandbox(argv, str(environment.root.parent))
        return self._held[key]

    def _argv(self, environment: Environment, *, network: bool) -> list[str]:
        argv = [*self._fixed]
        if network:
            argv += _bound_etc(_ETC_NETWORK)
        view, tmp = str(environment.view), str(environment.tmp)
        argv += ["--bind", view, HOME]
        for shared in SHARED_TMP:
            argv += [] if has_any(shared, self._shown) else ["--bind", tmp, shared]
        return [*argv, "--remount-ro", "/dev", "--remount-ro", "/"]

    def launch(self, environment: Environment, order: Order, rlimits: Mapping[int, int]) -> Launch:
        limits = order.limits
        enter: Mapping[int, int] = {}
        if self._holds:
            argv, folder = order.argv, Path(HOME)
            enter = self._hold(environment, network=limits.network).enter()
        else:
            argv = self._argv(environment, network=limits.network)
            argv += [] if limits.network else ["--unshare-net"]
            argv, folder = [*argv, "--chdir", HOME, "--", *order.argv], environment.view
        return Launch(
            argv=argv,
            variables=variables(order, HOME, self._tmp),
            folder=folder,
            user=environment.user,
            cores=order.cores,
            rlimits={
                **rlimits,
                resource.RLIMIT_FSIZE: limits.disk_bytes,
                resource.RLIMIT_CORE: 0,
            },
            own_network=self._holds and not limits.network,
            enter=enter,
        )

    def ended(self, environment: Environment) -> None:
        """Without root the process namespace of an action ends with it; else its fence ends what is left."""

    def closed(self, environment: Environment) -> None:
        for network in (False, True):
            held = self._held.pop((environment.name, network), None)
            if held is not None:
                held.close()

    def close(self) -> None:
        """Nothing is held beside the environments'."""


def _system() -> list[str]:
    """The machine's programs; links as links, so that paths look as they do outside."""
    arguments: list[str] = []
    for name in _SYSTEM:
        path = Path(name)
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), name]
        elif path.is_dir():
            arguments += ["--ro-bind", name, name]
    return arguments + _bound_etc(_ETC)


def _readable(folders: Sequence[Path]) -> list[str]:
    arguments: list[str] = []
    for path in folders:
        if path.is_dir() and not path.is_relative_to("/usr"):
            arguments += [*_made_above(path), "--ro-bind", str(path), str(path)]
    return arguments


def _made_above(path: Path | str) -> list[str]:
    """The folders above it, which bwrap itself makes for root alone."""
    above = [*Path(path).parents][-2::-1]
    return [word for folder in above for word in ("--perms", "0755", "--dir", str(folder))]


def _bound_etc(names: tuple[str, ...]) -> list[str]:
    arguments: list[str] = []
    for name in names:
        arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return arguments
