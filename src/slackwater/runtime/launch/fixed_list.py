"""A fixed list of named instances, each up or not; nothing beyond it can be started."""

from collections.abc import Sequence

from slackwater.model.errors import ConfigError
from slackwater.model.ids import InstanceId
from slackwater.runtime.launch.children import Children
from slackwater.runtime.launch.local_processes import ChildInstances


class FixedList(ChildInstances):
    """`start` brings up those of the list that are down, in the list's order.

    What runs for an entry is the spawner's matter: an engine here, or the adapter of a server
    elsewhere.
    """

    def __init__(self, children: Children, names: Sequence[str]) -> None:
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError.of("fixed list: names", repeated, "must be named once each")
        super().__init__(children)
        self._names = [InstanceId(name) for name in names]

    def __contains__(self, instance: InstanceId) -> bool:
        return instance in self._names

    def retire(self, instance: InstanceId) -> None:
        """Strike it from the list: once down, it stays down."""
        if instance in self._names:
            self._names.remove(instance)

    def start(self, count: int) -> tuple[InstanceId, ...]:
        down = [name for name in self._names if name not in self._children]
        for name in down[:count]:
            self._children.start(name)
        return tuple(down[:count])
