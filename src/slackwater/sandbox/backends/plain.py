"""A plain process group.

As root it runs as the environment's own user with its own network and temporary folders, so it can
neither write to other files nor signal other processes. Without root it has the worker's
privileges: for trusted code only, which the worker logs at start.
"""

from collections.abc import Mapping
from dataclasses import replace

from slackwater.model.errors import RefusedError
from slackwater.sandbox.backends.port import (
    Backend,
    Guarantee,
    Order,
    find_hidden_pythons,
    launch_as_user,
)
from slackwater.sandbox.environment import Environment
from slackwater.sandbox.launch import Launch
from slackwater.sandbox.mounts import MountMaker, Mounts
from slackwater.sandbox.namespaces import MountNamespace
from slackwater.sandbox.networks import Networks

_WITH_USERS: frozenset[Guarantee] = frozenset(("neighbours' files", "signals", "leftovers"))
_WITH_NAMESPACES: frozenset[Guarantee] = frozenset(("foreign files", "network"))


class PlainBackend(Backend):
    """`has_users`: one user per environment; `has_namespaces`: own networks and mounts."""

    name = "process"
    isolates = False  # it sees the machine's files and processes, also as root

    def __init__(self, networks: Networks, *, has_users: bool, has_namespaces: bool) -> None:
        self._networks = networks
        self._has_namespaces = has_namespaces
        self._visible = find_hidden_pythons()
        self._maker = MountMaker()
        self._namespaces: dict[str, MountNamespace] = {}
        guarantees = _WITH_USERS if has_users else frozenset[Guarantee]()
        self.guarantees = guarantees | (_WITH_NAMESPACES if has_namespaces else frozenset())

    def open_environment(self, environment: Environment) -> None:
        if self._has_namespaces:
            mounts = self._mounts(environment)
            self._namespaces[environment.name] = MountNamespace(mounts, self._maker)

    def _mounts(self, environment: Environment) -> Mounts:
        return Mounts(environment.view, environment.tmp, self._visible)

    def launch(self, environment: Environment, order: Order, rlimits: Mapping[int, int]) -> Launch:
        confined = self._has_namespaces
        tmp = self._mounts(environment).tmp if confined else environment.tmp
        network = self._network(environment) if order.limits.network else {}
        return replace(
            launch_as_user(environment, order, rlimits, environment.view, tmp),
            own_network=confined and not network,
            enter={**network, **self._namespaces[environment.name].enter()} if confined else {},
            filtered=confined,
        )

    def _network(self, environment: Environment) -> Mapping[int, int]:
        if not self._has_namespaces:
            raise RefusedError(
                "limits.network: True cannot be granted: a plain process without root has this "
                "machine's network, and cannot be confined to what the operator allows"
            )
        return self._networks.namespaces_for(environment.name)

    def close_environment(self, environment: Environment) -> None:
        namespaces = self._namespaces.pop(environment.name, None)
        if namespaces is not None:
            namespaces.close()
        self._networks.remove(environment.name)

    def close(self) -> None:
        self._maker.close()
        self._networks.close()
