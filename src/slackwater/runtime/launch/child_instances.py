"""Instances that are child processes: what every provider of such instances shares."""

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
