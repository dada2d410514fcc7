"""Instances as processes of this machine: as many as are asked for, up to a limit."""

from slackwater.model.errors import ConfigError
from slackwater.model.ids import InstanceId
from slackwater.runtime.launch.children import Children


class ChildInstances:
    """Everything of a provider (`launch/port.py`) but `start`, which each provider has itself."""

    def __init__(self, children: Children) -> None:
        self._children = children

    def notice(self, instance: InstanceId, grace_s: float) -> None:
        self._children.notice(instance, grace_s)

    def release(self, instance: InstanceId) -> None:
        self._children.release(instance)

    def kill(self, instance: InstanceId) -> None:
        self._children.kill(instance)

    def instances(self) -> tuple[InstanceId, ...]:
        return self._children.names()

    async def close(self) -> None:
        await self._children.close()


class LocalProcesses(ChildInstances):
    """Names them `PREFIX-1`, `PREFIX-2`, ...; a name is used once."""

    def __init__(self, children: Children, prefix: str, most: int = 64) -> None:
        if most <= 0:
            raise ConfigError.of("local processes: most", most, "must be above 0")
        super().__init__(children)
        self._prefix = prefix
        self._most = most
        self._started = 0

    def start(self, count: int) -> tuple[InstanceId, ...]:
        room = self._most - len(self._children.names())
        names: list[InstanceId] = []
        for _ in range(min(count, room)):
            self._started += 1
            names.append(InstanceId(f"{self._prefix}-{self._started}"))
            self._children.start(names[-1])
        return tuple(names)

    def start_named(self, instance: InstanceId) -> None:
        """Start one under a name of the caller's (a trace's)."""
        self._children.start(instance)
