"""What the clients, the faults and the trainer of a storm see of it; `storm.py` is the one that
has it all.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import FleetEvent
from slackwater.control.rollout.events import TurnEnded
from slackwater.control.rollout.manager import RolloutManager
from slackwater.model.ids import InstanceId, JobId, TrajectoryId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.sim.rollout.storm_instance import StormInstance, StormRequest


class TurnSource(Protocol):
    """Whoever sends turns."""

    def ask(
        self,
        trajectory: TrajectoryId,
        job: JobId,
        versions: tuple[str, ...],
        then: Callable[[], None],
        base_model: str = "",
    ) -> None: ...


class StormStage(Protocol):
    """One seeded run."""

    controller: FleetController
    manager: RolloutManager
    rng: np.random.Generator
    instances: dict[InstanceId, StormInstance]
    raging: bool
    version: int

    @property
    def now_s(self) -> float: ...

    @property
    def asks(self) -> TurnSource: ...

    def after(self, seconds: float, happen: Callable[[], None]) -> None: ...

    def wait_s(self, mean_s: float) -> float: ...

    def chance(self, share: float) -> bool: ...

    def happen(self, event: FleetEvent) -> None: ...

    def publish(self) -> None: ...

    def spec(self, kind: InstanceKind | None = None, base_model: str = "") -> InstanceSpec: ...

    def join(self, spec: InstanceSpec | None = None) -> None: ...

    def lives(self, instance: StormInstance) -> bool: ...

    def ending(self, instance: StormInstance, request: StormRequest) -> TurnEnded: ...
