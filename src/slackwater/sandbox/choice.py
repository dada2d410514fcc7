"""Choosing the means of this machine, once, and saying which and why."""

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
from slackwater.sandbox.launch import can_have_namespaces
from slackwater.sandbox.mounts import barrier_of
from slackwater.sandbox.networks import Networks
from slackwater.sandbox.snapshots import Snapshots, choose_way
from slackwater.sandbox.supervisor import SandboxMeans
from slackwater.sandbox.users import Users, users_here

BackendName = Literal["auto", "process", "bubblewrap", "docker", "gvisor"]


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """The means, and a line on each that an operator can read."""

    means: SandboxMeans
    said: tuple[str, ...]


def choose(
    name: str,
    root: Path,
    backend: BackendName = "auto",
    image: str = DEFAULT_IMAGE,
    *,
    allowed: Sequence[str] = (),
) -> ChosenBackend:
    """Choose backend, fences and snapshots; `auto` prefers bubblewrap; `image` is docker's.

    `name` is unique on this machine; `allowed` are the addresses that actions with a network reach.
    """
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", name):
        raise ConfigError.of("sandbox: name", name, "must be letters, digits, . _ -")
    if backend not in get_args(BackendName):
        raise ConfigError.of(
            "--sandbox-backend", backend, f"must be one of {', '.join(get_args(BackendName))}"
        )
    _make_folder(root)
    users = users_here()
    has_namespaces = users is not None and can_have_namespaces()
    endpoints = tuple(Endpoint.parse("--sandbox-allow", text) for text in allowed)
    networks = Networks(endpoints, as_root=has_namespaces)
    if backend == "docker":
        chosen, backend_said = _docker(image, root, networks, has_namespaces=has_namespaces)
    elif backend == "gvisor":
        chosen, backend_said = _gvisor(root)
    else:
        chosen, backend_said = _backend(
            backend, root / "etc", users, networks, has_namespaces=has_namespaces
        )
    if allowed and "network" not in chosen.guarantees:
        fix = "cannot be kept by plain processes without root: install bubblewrap, or leave it out"
        raise ConfigError.of("--sandbox-allow", " ".join(allowed), fix)
    fences, fences_said = choose_fences(name)
    barrier = barrier_of(root) if users is not None else None
    if barrier is not None:
        fix = f"must be where other users can pass through, and {barrier} is closed to them"
        raise ConfigError.of("--sandbox-folder", str(root), fix)
    # An engine does not see what is mounted for this process alone.
    way, way_said = choose_way(root, may_mount=backend != "docker")
    snapshots = Snapshots(root / "snapshots", way)
    user_said = "a user for each environment" if users is not None else "one user for all (no root)"
    said = (
        f"backend {chosen.name}: {backend_said}; keeps actions from: "
        + (", ".join(sorted(chosen.guarantees)) or "nothing (trusted code only)"),
        f"cores by {fences.name}: {fences_said}",
        f"snapshots by {way}: {way_said}",
        f"users: {user_said}",
        f"network: {' '.join(allowed) or 'none'}",
    )
    return ChosenBackend(SandboxMeans(chosen, fences, snapshots, users), said)


def _make_folder(root: Path) -> None:
    mask = os.umask(0o066)  # users of environments pass through, and see nothing
    try:
        root.mkdir(parents=True, exist_ok=True)
        root.chmod(0o711)
    except OSError as error:
        raise ConfigError.of("--sandbox-folder", str(root), f"cannot be made: {error}") from None
    finally:
        os.umask(mask)


def _gvisor(root: Path) -> tuple[Backend, str]:
    program, why = find_gvisor()
    if program is None:
        raise RefusedError(f"--sandbox-backend: 'gvisor' cannot be used: {why}")
    return GvisorBackend(program, root), why


def _docker(
    image: str, root: Path, networks: Networks, *, has_namespaces: bool
) -> tuple[Backend, str]:
    refused = "--sandbox-backend: 'docker' cannot be used"
    if not has_namespaces:
        raise RefusedError(f"{refused}: only root can enter containers, and make networks")
    engine, why = find_docker(image)
    if engine is None:
        raise RefusedError(f"{refused}: {why}")
    return DockerBackend(engine, image, root, networks=networks), why


def _backend(
    name: BackendName, etc: Path, users: Users | None, networks: Networks, *, has_namespaces: bool
) -> tuple[Backend, str]:
    plain = PlainBackend(users is not None, has_namespaces, networks=networks)
    if name == "process":
        return plain, "as asked"
    program, why = _bubblewrap_for(users)
    if program is not None:
        return BubblewrapBackend(program, etc, has_namespaces, networks=networks), why
    if name == "bubblewrap":
        raise RefusedError(f"--sandbox-backend: 'bubblewrap' cannot be used: {why}")
    return plain, why


def _bubblewrap_for(users: Users | None) -> tuple[str | None, str]:
    """Whether it runs as it would for an environment."""
    user = None if users is None else users.take()
    try:
        return find_bubblewrap(user)
    finally:
        if users is not None and user is not None:
            users.give_back(user)


def why_no_isolation(backend: str) -> str | None:
    """Why this choice would not isolate tenants here; None if it does, or does not start at all."""
    if backend == "process":
        return "the process backend was asked for"
    if backend != "auto":
        return None
    users = users_here()
    program, why = _bubblewrap_for(users)
    if users is not None:
        users.close()
    return None if program is not None else why


def keep_mounts_private() -> None:
    """As root: make this process's mounts private, so that they vanish with its children."""
    if os.getuid() == 0:
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
