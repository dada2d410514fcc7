"""Instances as processes of this machine: as many as are asked for."""

from slackwater.model.ids import InstanceId
from slackwater.runtime.launch.children import Children


class LocalProcesses:
    """Names them `PREFIX-1`, `PREFIX-2`, ...; a name is used once."""

    def __init__(self, children: Children, prefix: str) -> None:
        self._children = children
        self._prefix = prefix
        self._started = 0
        self.notice, self.release = children.notice, children.release
        self.kill, self.instances, self.close = children.kill, children.names, children.close

    def start(self, count: int) -> tuple[InstanceId, ...]:
        names: list[InstanceId] = []
        for _ in range(count):
            self._started += 1
            names.append(InstanceId(f"{self._prefix}-{self._started}"))
            self._children.start(names[-1])
        return tuple(names)
