"""Chooses, once per start, what confines actions on this machine, and describes the choice."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from slackwater.model.endpoint import Endpoint
from slackwater.model.errors import ConfigError, RefusedError
from slackwater.sandbox import linux
from slackwater.sandbox.backends.bubblewrap import BubblewrapBackend, find_bubblewrap
from slackwater.sandbox.backends.docker import DEFAULT_IMAGE, DockerBackend, find_docker
from slackwater.sandbox.backends.gvisor import GvisorBackend, find_gvisor
from slackwater.sandbox.backends.plain import PlainBackend
from slackwater.sandbox.backends.port import Backend
from slackwater.sandbox.cgroups import choose_fences
from slackwater.sandbox.launch import can_create_namespaces
from slackwater.sandbox.mounts import find_barrier
from slackwater.sandbox.networks import Networks
from slackwater.sandbox.snapshots import Snapshots, choose_method
from slackwater.sandbox.supervisor import SandboxPlatform
from slackwater.sandbox.users import UserPool, open_user_pool

BackendName = Literal["auto", "process", "bubblewrap", "docker", "gvisor"]


@dataclass(frozen=True, slots=True)
class SandboxChoice:
    """The chosen platform, and one line on each part for the operator."""

    platform: SandboxPlatform
    description: tuple[str, ...]


def choose(
    name: str,
    root: Path,
    backend: BackendName = "auto",
    image: str = DEFAULT_IMAGE,
    *,
    allowed: Sequence[str] = (),
) -> SandboxChoice:
    """Choose backend, fences and snapshots; `auto` prefers bubblewrap; `image` is docker's.

    `name` is unique on this machine; actions with a network can reach the addresses `allowed`.
    """
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", name):
        raise ConfigError.of("sandbox: name", name, "must be letters, digits, . _ -")
    if backend not in get_args(BackendName):
        raise ConfigError.of(
            "--sandbox-backend", backend, f"must be one of {', '.join(get_args(BackendName))}"
        )
    _make_folder(root)
    users = open_user_pool()
    has_namespaces = users is not None and can_create_namespaces()
    endpoints = tuple(Endpoint.parse("--sandbox-allow", text) for text in allowed)
    networks = Networks(endpoints, as_root=has_namespaces)
    if backend == "docker":
        chosen, backend_reason = _create_docker(
            image, root, networks, has_namespaces=has_namespaces
        )
    elif backend == "gvisor":
        chosen, backend_reason = _create_gvisor(root)
    else:
        chosen, backend_reason = _choose_backend(
            backend, root / "etc", users, networks, has_namespaces=has_namespaces
        )
    if allowed and "network" not in chosen.guarantees:
        fix = "cannot be enforced by plain processes without root: install bubblewrap, or omit it"
        raise ConfigError.of("--sandbox-allow", " ".join(allowed), fix)
    fences, fences_reason = choose_fences(name)
    barrier = find_barrier(root) if users is not None else None
    if barrier is not None:
        fix = f"must be where other users can pass through, and {barrier} is closed to them"
        raise ConfigError.of("--sandbox-folder", str(root), fix)
    # A container engine does not see mounts in this process's private namespace.
    method, method_reason = choose_method(root, may_mount=backend != "docker")
    snapshots = Snapshots(root / "snapshots", method)
    users_reason = "one per environment" if users is not None else "one for all (no root)"
    description = (
        f"backend {chosen.name}: {backend_reason}; keeps actions from: "
        + (", ".join(sorted(chosen.guarantees)) or "nothing (trusted code only)"),
        f"cores by {fences.name}: {fences_reason}",
        f"snapshots by {method}: {method_reason}",
        f"users: {users_reason}",
        f"network: {' '.join(allowed) or 'none'}",
    )
    return SandboxChoice(SandboxPlatform(chosen, fences, snapshots, users), description)


def _make_folder(root: Path) -> None:
    mask = os.umask(0o066)  # users of environments can traverse it but not list it
    try:
        root.mkdir(parents=True, exist_ok=True)
        root.chmod(0o711)
    except OSError as error:
        raise ConfigError.of("--sandbox-folder", str(root), f"cannot be created: {error}") from None
    finally:
        os.umask(mask)


def _create_gvisor(root: Path) -> tuple[Backend, str]:
    program, why = find_gvisor()
    if program is None:
        raise RefusedError(f"--sandbox-backend: 'gvisor' cannot be used: {why}")
    return GvisorBackend(program, root), why


def _create_docker(
    image: str, root: Path, networks: Networks, *, has_namespaces: bool
) -> tuple[Backend, str]:
    refusal = "--sandbox-backend: 'docker' cannot be used"
    if not has_namespaces:
        raise RefusedError(f"{refusal}: only root can enter containers and create networks")
    engine, why = find_docker(image)
    if engine is None:
        raise RefusedError(f"{refusal}: {why}")
    return DockerBackend(engine, image, root, networks), why


def _choose_backend(
    name: BackendName,
    etc: Path,
    users: UserPool | None,
    networks: Networks,
    *,
    has_namespaces: bool,
) -> tuple[Backend, str]:
    plain = PlainBackend(networks, has_users=users is not None, has_namespaces=has_namespaces)
    if name == "process":
        return plain, "as requested"
    program, why = _probe_bubblewrap(users)
    if program is not None:
        return BubblewrapBackend(program, etc, networks, has_namespaces=has_namespaces), why
    if name == "bubblewrap":
        raise RefusedError(f"--sandbox-backend: 'bubblewrap' cannot be used: {why}")
    return plain, why


def _probe_bubblewrap(users: UserPool | None) -> tuple[str | None, str]:
    """Try bubblewrap with the user of an environment."""
    user = None if users is None else users.allocate()
    try:
        return find_bubblewrap(user)
    finally:
        if users is not None and user is not None:
            users.release(user)


def find_isolation_gap(backend: str) -> str | None:
    """Why this choice would not isolate tenants here; None if it does, or if it does not start."""
    if backend == "process":
        return "the process backend was requested"
    if backend != "auto":
        return None
    users = open_user_pool()
    program, why = _probe_bubblewrap(users)
    if users is not None:
        users.close()
    return None if program is not None else why


def keep_mounts_private() -> None:
    """As root: make this process's mounts private, so that they vanish with its children."""
    if os.getuid() == 0:
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
