"""bubblewrap: each environment has its own namespaces and can write only to its folder.

The machine's programs and libraries are readable under their own paths, and a copy of what is
public in /etc, made at the start; the environment is at /sandbox.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slackwater.sandbox.backends.port import ALL_GUARANTEES, Backend, Order, variables
from slackwater.sandbox.environment import Environment
from slackwater.sandbox.held import HeldSandbox
from slackwater.sandbox.launch import FIRST_INPUT, LAUNCHER_FOLDER, LAUNCHER_VARIABLES, Launch
from slackwater.sandbox.mounts import COVER_BYTES, SHARED_TMP, has_any, tmp_beside
from slackwater.sandbox.networks import Networks
from slackwater.sandbox.system_calls import filter_program

HOME = "/sandbox"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = (
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
    "services",
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
            cwd=LAUNCHER_FOLDER,
            env=LAUNCHER_VARIABLES,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"bwrap does not run: {error}"
    if tried.returncode != 0:
        return None, f"bwrap does not run: {tried.stderr.strip()}"
    return program, "bwrap runs"


def _disabled_userns(program: str) -> list[str]:
    """Versions from 0.8 on can also forbid user namespaces inside by the kernel's own limit."""
    told = subprocess.run(
        [program, "--help"],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
        cwd=LAUNCHER_FOLDER,
        env=LAUNCHER_VARIABLES,
    )
    option = "--disable-userns"
    return [option] if option in told.stdout + told.stderr else []


class BubblewrapBackend(Backend):
    """`program` is bwrap; `etc` is where /etc is copied to; `shown` are further readable folders;
    `networks` may be granted.

    With `has_namespaces` (root) an environment's namespaces are made once and held, and its network
    is its lane's; otherwise every action has its own bwrap.
    """

    name = "bubblewrap"
    isolates = True
    guarantees = ALL_GUARANTEES

    def __init__(
        self,
        program: str,
        etc: Path,
        has_namespaces: bool = False,
        shown: tuple[Path, ...] = (),
        *,
        networks: Networks | None = None,
    ) -> None:
        self._holds = has_namespaces
        self._networks = networks or Networks()
        self._held: dict[str, HeldSandbox] = {}
        self._ending: list[HeldSandbox] = []
        self._shown = tuple(dict.fromkeys((*shown, Path(sys.prefix), Path(sys.base_prefix))))
        self._tmp = tmp_beside(self._shown)
        self._program = program
        self._filter = filter_program()
        self._fixed = ["--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        if not has_namespaces:
            self._fixed += ["--unshare-user", *_disabled_userns(program)]
        self._fixed += ["--unshare-cgroup-try", "--die-with-parent", "--cap-drop", "ALL"]
        copy_etc(etc)
        self._fixed += ["--hostname", "sandbox", *_system(), "--ro-bind", str(etc), "/etc"]
        self._fixed += ["--proc", "/proc", "--dev", "/dev", *_made_above("/var/tmp")]
        for tmp in SHARED_TMP:
            if has_any(tmp, self._shown):
                self._fixed += ["--size", str(COVER_BYTES), "--perms", "1777", "--tmpfs", tmp]
        self._fixed += _readable(self._shown)

    def opened(self, environment: Environment) -> None:
        if self._holds:
            self._hold(environment)

    def _hold(self, environment: Environment) -> HeldSandbox:
        name = environment.name
        if name in self._held and self._held[name].is_lost:
            self._end(self._held.pop(name))
        if name not in self._held:
            argv = [self._program, *self._options(environment)]
            self._held[name] = HeldSandbox(argv, os.path.dirname(environment.root))
        return self._held[name]

    def _options(self, environment: Environment) -> list[str]:
        options = [*self._fixed]
        options += ["--bind", environment.view, HOME]
        for shared in SHARED_TMP:
            options += [] if has_any(shared, self._shown) else ["--bind", environment.tmp, shared]
        return [*options, "--remount-ro", "/dev", "--remount-ro", "/"]

    def readiness(self, environment: Environment) -> int | None:
        return self._hold(environment).readiness if self._holds else None

    def launch(self, environment: Environment, order: Order, rlimits: Mapping[int, int]) -> Launch:
        limits = order.limits
        given = variables(order, HOME, self._tmp)
        limited = Launch(
            argv=order.argv,
            variables=given,
            folder=HOME,
            user=environment.user,
            cores=order.cores,
            rlimits={**rlimits, **order.limits.rlimits()},
        )
        network = self._networks.of(environment.name) if limits.network else {}
        if self._holds:
            enter = {**network, **self._hold(environment).enter()}
            return replace(limited, own_network=not network, enter=enter, filtered=True)
        options = self._options(environment)
        options += [] if network else ["--unshare-net"]
        options += ["--seccomp", str(FIRST_INPUT + 1), "--chdir", HOME, "--clearenv"]
        for name, value in given.items():
            options += ["--setenv", name, value]
        return replace(
            limited,
            # Everybody sees a command line; nobody sees what bwrap reads from a descriptor.
            argv=[self._program, "--args", str(FIRST_INPUT), "--", *order.argv],
            inputs=(b"\0".join(os.fsencode(option) for option in options), self._filter),
            variables=LAUNCHER_VARIABLES,
            folder=LAUNCHER_FOLDER,
            enter=network,
        )

    def closed(self, environment: Environment) -> None:
        held = self._held.pop(environment.name, None)
        if held is not None:
            self._end(held)
        self._networks.forget(environment.name)

    def _end(self, held: HeldSandbox) -> None:
        """End it without waiting, so that others' actions continue."""
        held.close()
        self._ending.append(held)
        self._reap([each for each in self._ending if each.has_ended])

    def _reap(self, ended: Sequence[HeldSandbox]) -> None:
        for each in ended:
            each.reap()
            self._ending.remove(each)

    def close(self) -> None:
        self._reap(tuple(self._ending))
        self._networks.close()


def _system() -> list[str]:
    """The machine's programs; links as links, so that paths look as they do outside."""
    arguments: list[str] = []
    for name in SYSTEM:
        path = Path(name)
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), name]
        elif path.is_dir():
            arguments += ["--ro-bind", name, name]
    return arguments


def _readable(folders: Sequence[Path]) -> list[str]:
    arguments: list[str] = []
    for path in folders:
        if os.access(path, os.R_OK | os.X_OK) and not path.is_relative_to("/usr"):
            arguments += [*_made_above(path), "--ro-bind", str(path), str(path)]
    return arguments


def _made_above(path: Path | str) -> list[str]:
    """The folders above it, which bwrap itself makes for root alone."""
    above = [*Path(path).parents][-2::-1]
    return [word for folder in above for word in ("--perms", "0755", "--dir", str(folder))]


def copy_etc(folder: Path) -> None:
    """Copy what is public: one mount for all takes bwrap 1.5 ms less than one for each name."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    folder.chmod(0o755)
    for name in ETC:
        source, keys = Path("/etc", name), shutil.ignore_patterns("private")
        with contextlib.suppress(OSError, shutil.Error):  # there is none, or part is not public
            if source.is_dir():
                shutil.copytree(source, folder / name, symlinks=True, ignore=keys)
            else:
                shutil.copy2(source, folder / name)
