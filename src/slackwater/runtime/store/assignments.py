"""Which deployment owns which devices, kept so that a new control plane gives it the same ones."""

from collections.abc import Callable, Mapping, Sequence

import msgspec
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from slackwater.model.ids import DeploymentId, DeviceId
from slackwater.runtime.net.background import Background
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.schema import facts

_NAME = "device_assignments"

Assignments = Mapping[DeploymentId, Sequence[DeviceId]]


class AssignmentStore:
    """One fact of the store; all changes of one turn of the event loop are written at once."""

    def __init__(self, store: Store, background: Background) -> None:
        self._store, self._background = store, background
        self._saving = False

    def save_soon(self, current: Callable[[], Assignments]) -> None:
        if not self._saving:
            self._saving = True
            self._background.spawn(self._save(current))

    async def _save(self, current: Callable[[], Assignments]) -> None:
        self._saving = False
        value = msgspec.json.encode(current()).decode()

        def write(connection: Connection) -> None:
            mine = facts.c.name == _NAME
            if not connection.execute(facts.update().where(mine).values(value=value)).rowcount:
                connection.execute(facts.insert().values(name=_NAME, value=value))

        await self._store.call(write)

    async def read(self) -> dict[DeploymentId, tuple[DeviceId, ...]]:
        query = sa.select(facts.c.value).where(facts.c.name == _NAME)
        value = await self._store.call(lambda connection: connection.execute(query).scalar())
        if value is None:
            return {}
        return msgspec.json.decode(value, type=dict[DeploymentId, tuple[DeviceId, ...]])
