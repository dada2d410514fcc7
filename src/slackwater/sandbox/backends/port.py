"""The backend interface: turns an order into a confined process to start."""

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from slackwater.model.action_input import check_command
from slackwater.sandbox.environment import Environment
from slackwater.sandbox.launch import Launch
from slackwater.sandbox.limits import Limits
from slackwater.sandbox.mounts import SHARED_TMP, UnreachableFolder, contains_any, find_barrier
from slackwater.sandbox.networks import proxy_variables

# What a backend keeps an action from: writing foreign files, reading other environments' files,
# using the network, signalling other environments' processes, leaving processes behind.
Guarantee = Literal["foreign files", "neighbours' files", "network", "signals", "leftovers"]
ALL_GUARANTEES: frozenset[Guarantee] = frozenset(get_args(Guarantee))
_SYSTEM_PATH = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin")
_PATH = os.pathsep.join((str(Path(sys.executable).parent), *_SYSTEM_PATH))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One action; `{cores}` in the command becomes the number of cores."""

    action: str
    environment: str
    command: Sequence[str]
    cores: frozenset[int]
    limits: Limits = field(default_factory=Limits)
    variables: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""

    @property
    def argv(self) -> list[str]:
        return [part.replace("{cores}", str(len(self.cores))) for part in self.command]


class Backend(ABC):
    """One way to confine actions, with its `guarantees`; `isolates` if tenants need no trust."""

    name: str
    isolates: bool
    guarantees: frozenset[Guarantee]

    @abstractmethod
    def open_environment(self, environment: Environment) -> None:
        """Allocate the environment's resources."""

    def readiness(self, environment: Environment) -> int | None:
        """A descriptor that is readable once `launch` does not block; None: it does not now."""
        del environment
        return None

    @abstractmethod
    def launch(self, environment: Environment, order: Order, rlimits: Mapping[int, int]) -> Launch:
        """The process to start for an order; `rlimits` come from its fence."""

    @abstractmethod
    def close_environment(self, environment: Environment) -> None:
        """Release the environment's resources."""

    @abstractmethod
    def close(self) -> None:
        """Release shared resources."""


def variables(order: Order, home: str, tmp: str) -> dict[str, str]:
    """The variables of an action; its own override the defaults. ConfigError if one is invalid."""
    check_command(order.command, order.variables)
    cores = str(max(len(order.cores), 1))
    base = {"HOME": home, "TMPDIR": tmp, "PATH": _PATH, "LANG": "C.UTF-8", "USER": "sandbox"}
    threads = {"SLACKWATER_CORES": cores, "OMP_NUM_THREADS": cores}
    proxy = proxy_variables() if order.limits.network else {}
    return base | threads | proxy | dict(order.variables)


def launch_as_user(
    environment: Environment, order: Order, rlimits: Mapping[int, int], home: str, tmp: str
) -> Launch:
    """An order's process in the environment's home, as its user, within the order's limits."""
    return Launch(
        argv=order.argv,
        variables=variables(order, home, tmp),
        folder=home,
        user=environment.user,
        cores=order.cores,
        rlimits={**rlimits, **order.limits.rlimits()},
    )


def python_folders() -> tuple[Path, ...]:
    """This interpreter's folders, which actions may read."""
    return tuple(dict.fromkeys((Path(sys.prefix), Path(sys.base_prefix))))


def find_hidden_pythons() -> tuple[UnreachableFolder, ...]:
    """This interpreter's folders that lie in a private home or a temporary folder."""
    hidden = []
    for folder in python_folders():
        covered = (Path(shared) for shared in SHARED_TMP if contains_any(shared, [folder]))
        barrier = find_barrier(folder) or next(covered, None)
        if barrier is not None:
            hidden.append(UnreachableFolder(barrier, folder))
    return tuple(hidden)
