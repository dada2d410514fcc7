"""gVisor (`runsc`): every action has a sandbox with its own user-space kernel.

System calls reach that kernel, not the machine's. An action is an OCI bundle: a folder with
`config.json` that no environment sees. The view is bubblewrap's: programs are readable, the
environment is at /sandbox.
"""

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slackwater.model.errors import RefusedError
from slackwater.sandbox.backends.bubblewrap import ETC, HOME, SYSTEM, run_launcher
from slackwater.sandbox.backends.port import (
    ALL_GUARANTEES,
    Backend,
    Order,
    python_folders,
    variables,
)
from slackwater.sandbox.environment import Environment
from slackwater.sandbox.launch import LAUNCHER_FOLDER, LAUNCHER_VARIABLES, Launch
from slackwater.sandbox.mounts import SHARED_TMP, contains_any, pick_tmp

_LIMITS = {resource.RLIMIT_FSIZE: "RLIMIT_FSIZE", resource.RLIMIT_AS: "RLIMIT_AS"}


def find_gvisor() -> tuple[str | None, str]:
    """The program, or None and why not."""
    program = shutil.which("runsc")
    if program is None:
        return None, "runsc is not installed"
    try:
        probe = run_launcher([program, "--version"])
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"runsc does not run: {error}"
    if probe.returncode != 0:
        return None, f"runsc does not run: {probe.stderr.strip()}"
    return program, "runsc runs"


class GvisorBackend(Backend):
    """`program` is runsc's path; `root` is the supervisor's folder for bundles and state."""

    name = "gvisor"
    isolates = True
    guarantees = ALL_GUARANTEES

    def __init__(self, program: str, root: Path) -> None:
        self._program = program
        self._root = root / "gvisor"
        shutil.rmtree(self._root, ignore_errors=True)
        for name in ("bundles", "files", "state"):
            (self._root / name).mkdir(parents=True, mode=0o700)
        self._visible = python_folders()
        self._tmp = pick_tmp(self._visible)
        self._mounts = [_mount("proc", "/proc", "proc"), _mount("tmpfs", "/dev", "tmpfs")]
        for name in SYSTEM:
            path = Path(name)
            if path.is_symlink():
                (self._root / "files" / name[1:]).symlink_to(path.readlink())
            elif path.is_dir():
                self._mounts.append(_bind(name, name))
        readable = [Path("/etc", name) for name in ETC] + [
            path for path in self._visible if not path.is_relative_to("/usr")
        ]
        self._mounts += [_bind(str(path), str(path)) for path in readable if path.exists()]
        mounts = [*self._mounts, *(_mount("tmpfs", at, "tmpfs") for at in (HOME, *SHARED_TMP))]
        for mount in mounts:
            self._create_mountpoint(mount)

    def _create_mountpoint(self, mount: Mapping[str, Any]) -> None:
        """A mount needs a file or folder of the same kind to cover."""
        mountpoint = self._root / "files" / str(mount["destination"])[1:]
        mountpoint.parent.mkdir(parents=True, exist_ok=True)
        if Path(mount["source"]).is_file():
            mountpoint.touch()
        else:
            mountpoint.mkdir(exist_ok=True)

    def open_environment(self, environment: Environment) -> None:
        (self._root / "bundles" / environment.name).mkdir(mode=0o700)

    def launch(self, environment: Environment, order: Order, rlimits: Mapping[int, int]) -> Launch:
        if order.limits.network:
            raise RefusedError("limits.network: True cannot be granted with the gvisor backend")
        bundle = self._root / "bundles" / environment.name / order.action
        bundle.mkdir(mode=0o700)
        limits = {**rlimits, resource.RLIMIT_FSIZE: order.limits.disk_bytes}
        config = json.dumps(self.config(environment, order, limits))
        with os.fdopen(
            os.open(bundle / "config.json", os.O_WRONLY | os.O_CREAT, 0o600), "w"
        ) as file:
            file.write(config)
        options = ["--root", str(self._root / "state"), "--network=none", "--ignore-cgroups"]
        options += [] if os.getuid() == 0 else ["--rootless"]
        return Launch(
            argv=[self._program, *options, "run", "--bundle", str(bundle), f"a-{order.action}"],
            variables=LAUNCHER_VARIABLES,
            folder=LAUNCHER_FOLDER,
            cores=order.cores,
            # The other limits apply to the action, not to its kernel.
            rlimits={resource.RLIMIT_CORE: 0},
        )

    def config(
        self, environment: Environment, order: Order, rlimits: Mapping[int, int]
    ) -> dict[str, Any]:
        user = environment.user or 0
        tmp = [shared for shared in SHARED_TMP if not contains_any(shared, self._visible)]
        own = [_bind(environment.view, HOME, "rw")]
        own += [_bind(environment.tmp, shared, "rw") for shared in tmp]
        action_variables = variables(order, HOME, self._tmp)
        kinds = ("pid", "ipc", "uts", "mount", "network")
        return {
            "ociVersion": "1.0.2",
            "hostname": "sandbox",
            "root": {"path": str(self._root / "files"), "readonly": True},
            "mounts": [*self._mounts, *own],
            "process": {
                "terminal": False,
                "user": {"uid": user, "gid": user},
                "args": order.argv,
                "env": [f"{name}={value}" for name, value in action_variables.items()],
                "cwd": HOME,
                "capabilities": {
                    each: []
                    for each in ("bounding", "effective", "inheritable", "permitted", "ambient")
                },
                "noNewPrivileges": True,
                "rlimits": [
                    {"type": _LIMITS[kind], "hard": most, "soft": most}
                    for kind, most in rlimits.items()
                    if kind in _LIMITS
                ],
            },
            "linux": {"namespaces": [{"type": kind} for kind in kinds]},
        }

    def close_environment(self, environment: Environment) -> None:
        shutil.rmtree(self._root / "bundles" / environment.name, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


def _mount(source: str, destination: str, kind: str) -> dict[str, Any]:
    return {"destination": destination, "type": kind, "source": source}


def _bind(source: str, destination: str, access: str = "ro") -> dict[str, Any]:
    options = ["rbind", "nosuid", "nodev", access]
    return {"destination": destination, "type": "bind", "source": source, "options": options}
