"""Saves which deployment owns which devices, so that a new control plane assigns the same ones."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from slackwater.model.ids import DeploymentId, DeviceId
from slackwater.runtime.net.background import Background
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.job_accounts import find_fact, put_fact

_NAME = "device_assignments"

Assignments = Mapping[DeploymentId, Sequence[DeviceId]]


class AssignmentStore:
    """One fact of the store; all changes of one round of the event loop are one write."""

    def __init__(self, store: Store, background: Background) -> None:
        self._store, self._background = store, background
        self._saving = False

    def save_soon(self, current: Callable[[], Assignments]) -> None:
        if not self._saving:
            self._saving = True
            self._background.spawn(self._save(current))

    async def _save(self, current: Callable[[], Assignments]) -> None:
        self._saving = False
        await self._store.call(partial(put_fact, name=_NAME, value=current()))

    async def read(self) -> dict[DeploymentId, tuple[DeviceId, ...]]:
        kind = dict[DeploymentId, tuple[DeviceId, ...]]
        return await self._store.call(partial(find_fact, name=_NAME, kind=kind)) or {}
