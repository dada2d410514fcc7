"""A trainer's models under the node's state manager: an operation runs with its model on device.

The manager decides which models are resident; the least recently used make room.
"""

import contextlib
import itertools
import logging
import os
from collections.abc import Iterator

from slackwater.model.residency import DISK_MB
from slackwater.state.client import SOCKET_VARIABLE, StateClient
from slackwater.state.device import DeviceTier
from slackwater.training.managed_state import ManagedState
from slackwater.training.trainer import Trainer
from slackwater.worker.process import node_secret
from slackwater.worker.state_service import MOVED

logger = logging.getLogger(__name__)

_NO_LIMIT = 1 << 62  # the budget is the manager's


class ResidentModels:
    """Deployments by model; creating a model again replaces its deployment."""

    def __init__(self, client: StateClient, device: str) -> None:
        self._client = client
        self._tier = DeviceTier(client, client.name, _NO_LIMIT, device)
        client.attach(self._tier)
        self._deployments: dict[str, str] = {}
        self._states: dict[str, ManagedState] = {}
        self._numbers = itertools.count(1)

    def add(self, model: str, trainer: Trainer, seq: int = -1, at_most: int = -1) -> int | None:
        """Manage a model's state as of operation `seq`; RefusedError if it does not fit.

        If a dead worker left a later state, up to `at_most`, in the node's memory, that state is
        used and its number returned.
        """
        mine = f"{model}@{self._client.name}-{os.getpid()}.{next(self._numbers)}"
        left = self._client.survivor(f"{model}@", seq, at_most)
        if left is None:  # what is of no use must not stand in the way
            self._client.forget_abandoned(f"{model}@")
        deployment = left or mine
        state = ManagedState(trainer, model, deployment, seq)
        self._tier.add(deployment, state.parts(), state, warm=not _spills())
        self._client.forget_abandoned(f"{model}@")
        self._deployments[model], self._states[model] = deployment, state
        with self._tier.use(deployment):
            pass  # its memory is the managed one from here on
        if left is None:
            return None
        how = "came from another node" if f"@{MOVED}" in left else "outlived its trainer"
        logger.info("model %s: its state after operation %d %s", model, state.seq, how)
        return state.seq

    @contextlib.contextmanager
    def use(self, model: str, seq: int | None = None) -> Iterator[None]:
        """Keep the model's state on the device inside; operation `seq` changes it."""
        with self._tier.use(self._deployments[model]):
            yield
            if seq is not None:
                self._states[model].seq = seq

    def hint(self, models: list[str]) -> None:
        """What runs next, in order."""
        known = [self._deployments[model] for model in models if model in self._deployments]
        self._client.prefetch(known)

    def drop(self, model: str) -> None:
        self._states.pop(model, None)
        deployment = self._deployments.pop(model, None)
        if deployment is not None:
            self._client.forget_when_unused(deployment)

    def close(self) -> None:
        self._client.close()
        self._tier.close()


def _spills() -> bool:
    return float(os.environ.get(DISK_MB) or 0) > 0


def resident_models(worker: str, device: str) -> ResidentModels | None:
    """None where the node has no state manager."""
    path = os.environ.get(SOCKET_VARIABLE)
    if not path:
        return None
    return ResidentModels(StateClient(path, worker, node_secret()), device)
