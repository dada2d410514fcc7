"""bubblewrap: each environment has its own namespaces and can write only to its folder.

The machine's programs and libraries are readable under their own paths, as is a copy of the public
part of /etc from the start; the environment is at /sandbox.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slackwater.sandbox.backends.port import (
    ALL_GUARANTEES,
    Backend,
    Order,
    launch_as_user,
    python_folders,
)
from slackwater.sandbox.environment import Environment
from slackwater.sandbox.launch import FIRST_INPUT, LAUNCHER_FOLDER, LAUNCHER_VARIABLES, Launch
from slackwater.sandbox.mounts import COVER_BYTES, SHARED_TMP, contains_any, pick_tmp
from slackwater.sandbox.namespaces import BubblewrapNamespaces
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
        probe = run_launcher([*command, "--proc", "/proc", "--dev", "/dev", "/bin/true"], user)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"bwrap does not run: {error}"
    if probe.returncode != 0:
        return None, f"bwrap does not run: {probe.stderr.strip()}"
    return program, "bwrap runs"


def run_launcher(
    command: Sequence[str], user: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a launcher to see what it can do, with nothing of this process's environment."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
        user=user,
        cwd=LAUNCHER_FOLDER,
        env=LAUNCHER_VARIABLES,
    )


def _disable_userns_option(program: str) -> list[str]:
    """From version 0.8 bwrap can also forbid user namespaces inside by the kernel's limit."""
    help_text = run_launcher([program, "--help"])
    option = "--disable-userns"
    return [option] if option in help_text.stdout + help_text.stderr else []


class BubblewrapBackend(Backend):
    """`program` is bwrap; /etc is copied to `etc`.

    With `has_namespaces` (root) an environment's namespaces are created once and kept, and its
    network is its lane's; otherwise every action has its own bwrap.
    """

    name = "bubblewrap"
    isolates = True
    guarantees = ALL_GUARANTEES

    def __init__(
        self,
        program: str,
        etc: Path,
        networks: Networks,
        *,
        has_namespaces: bool,
    ) -> None:
        self._has_namespaces = has_namespaces
        self._networks = networks
        self._namespaces: dict[str, BubblewrapNamespaces] = {}
        self._closing: list[BubblewrapNamespaces] = []
        self._visible = python_folders()
        self._tmp = pick_tmp(self._visible)
        self._program = program
        self._filter = filter_program()
        self._fixed = ["--unshare-pid", "--unshare-ipc", "--unshare-uts"]
        if not has_namespaces:
            self._fixed += ["--unshare-user", *_disable_userns_option(program)]
        self._fixed += ["--unshare-cgroup-try", "--die-with-parent", "--cap-drop", "ALL"]
        copy_etc(etc)
        self._fixed += ["--hostname", "sandbox", *_system_mounts(), "--ro-bind", str(etc), "/etc"]
        self._fixed += ["--proc", "/proc", "--dev", "/dev", *_parent_folders("/var/tmp")]
        for tmp in SHARED_TMP:
            if contains_any(tmp, self._visible):
                self._fixed += ["--size", str(COVER_BYTES), "--perms", "1777", "--tmpfs", tmp]
        self._fixed += _readable_mounts(self._visible)

    def open_environment(self, environment: Environment) -> None:
        if self._has_namespaces:
            self._ensure_namespaces(environment)

    def _ensure_namespaces(self, environment: Environment) -> BubblewrapNamespaces:
        name = environment.name
        if name in self._namespaces and self._namespaces[name].is_lost:
            self._begin_close(self._namespaces.pop(name))
        if name not in self._namespaces:
            argv = [self._program, *self._options(environment)]
            self._namespaces[name] = BubblewrapNamespaces(argv, os.path.dirname(environment.root))
        return self._namespaces[name]

    def _options(self, environment: Environment) -> list[str]:
        options = [*self._fixed]
        options += ["--bind", environment.view, HOME]
        for shared in SHARED_TMP:
            if not contains_any(shared, self._visible):
                options += ["--bind", environment.tmp, shared]
        return [*options, "--remount-ro", "/dev", "--remount-ro", "/"]

    def readiness(self, environment: Environment) -> int | None:
        return self._ensure_namespaces(environment).readiness if self._has_namespaces else None

    def launch(self, environment: Environment, order: Order, rlimits: Mapping[int, int]) -> Launch:
        limited = launch_as_user(environment, order, rlimits, HOME, self._tmp)
        network = self._networks.namespaces_for(environment.name) if order.limits.network else {}
        if self._has_namespaces:
            enter = {**network, **self._ensure_namespaces(environment).enter()}
            return replace(limited, own_network=not network, enter=enter, filtered=True)
        options = self._options(environment)
        options += [] if network else ["--unshare-net"]
        options += ["--seccomp", str(FIRST_INPUT + 1), "--chdir", HOME, "--clearenv"]
        for name, value in limited.variables.items():
            options += ["--setenv", name, value]
        return replace(
            limited,
            # Any user can read a command line; what bwrap reads from a descriptor stays private.
            argv=[self._program, "--args", str(FIRST_INPUT), "--", *order.argv],
            inputs=(b"\0".join(os.fsencode(option) for option in options), self._filter),
            variables=LAUNCHER_VARIABLES,
            folder=LAUNCHER_FOLDER,
            enter=network,
        )

    def close_environment(self, environment: Environment) -> None:
        namespaces = self._namespaces.pop(environment.name, None)
        if namespaces is not None:
            self._begin_close(namespaces)
        self._networks.remove(environment.name)

    def _begin_close(self, namespaces: BubblewrapNamespaces) -> None:
        """Close it without waiting, so that other actions are not delayed."""
        namespaces.close()
        self._closing.append(namespaces)
        self._reap([each for each in self._closing if each.has_ended])

    def _reap(self, ended: Sequence[BubblewrapNamespaces]) -> None:
        for each in ended:
            each.reap()
            self._closing.remove(each)

    def close(self) -> None:
        self._reap(tuple(self._closing))
        self._networks.close()


def _system_mounts() -> list[str]:
    """Mounts of the machine's programs; links stay links, so paths are the same as outside."""
    arguments: list[str] = []
    for name in SYSTEM:
        path = Path(name)
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), name]
        elif path.is_dir():
            arguments += ["--ro-bind", name, name]
    return arguments


def _readable_mounts(folders: Sequence[Path]) -> list[str]:
    arguments: list[str] = []
    for path in folders:
        if os.access(path, os.R_OK | os.X_OK) and not path.is_relative_to("/usr"):
            arguments += [*_parent_folders(path), "--ro-bind", str(path), str(path)]
    return arguments


def _parent_folders(path: Path | str) -> list[str]:
    """Options for the folders above a path: by default bwrap creates them for root alone."""
    parents = [*Path(path).parents][-2::-1]
    return [word for folder in parents for word in ("--perms", "0755", "--dir", str(folder))]


def copy_etc(folder: Path) -> None:
    """Copy the public part of /etc: one mount takes bwrap 1.5 ms less than one for each name."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    folder.chmod(0o755)
    for name in ETC:
        source, private = Path("/etc", name), shutil.ignore_patterns("private")
        # It may be missing, or part of it is not public.
        with contextlib.suppress(OSError, shutil.Error):
            if source.is_dir():
                shutil.copytree(source, folder / name, symlinks=True, ignore=private)
            else:
                shutil.copy2(source, folder / name)
