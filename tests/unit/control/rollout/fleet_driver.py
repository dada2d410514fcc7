"""A hand on the manager: short ways to say what happens, integrity checked after every event."""

from collections.abc import Sequence
from typing import Any, TypeVar

from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import FleetCommand, FleetEvent
from slackwater.control.rollout.commands import DispatchTurn
from slackwater.control.rollout.events import (
    InstanceJoined,
    RolloutEvent,
    TokensArrived,
    TurnEnded,
    TurnSubmitted,
)
from slackwater.control.rollout.manager import WATCH
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.control.timer import TimerFired
from slackwater.control.weights.events import InstanceReady, WeightsPublished
from slackwater.model.ids import InstanceId, JobId, TrajectoryId, TurnId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.model.sampling import Sampling
from slackwater.model.turn import AttemptId, FinishReason, TurnSpec

C = TypeVar("C")


class FleetDriver:
    """One controller and a clock."""

    def __init__(self, **settings: Any) -> None:
        self.controller = FleetController(RolloutSettings(**settings))
        self.manager = self.controller.rollout
        self.now_s = 0.0

    def happen(self, event: FleetEvent) -> list[FleetCommand]:
        commands = list(self.controller.handle(event))
        self.controller.check_integrity()
        return commands

    def manager_hears(self, event: RolloutEvent) -> list[FleetCommand]:
        """What the step book would say, without one."""
        commands = list(self.manager.handle(event))
        self.manager.check_integrity()
        return list(commands)

    def submit(self, name: str, **spec: Any) -> list[FleetCommand]:
        return self.happen(TurnSubmitted(self.now_s, turn_spec(name, **spec)))

    def join(self, name: str, *, version: str = "v1", **spec: Any) -> list[FleetCommand]:
        """Joined, pulled, ready; the version is anybody's."""
        self.happen(WeightsPublished(self.now_s, None, version))
        first = self.happen(InstanceJoined(self.now_s, instance_spec(name, **spec)))
        return first + self.happen(InstanceReady(self.now_s, InstanceId(name), version))

    def tokens(self, instance: str, attempt: int, tokens: Sequence[int]) -> list[FleetCommand]:
        return self.happen(
            TokensArrived(
                self.now_s,
                InstanceId(instance),
                [attempt],
                list(tokens),
                [-1.0] * len(tokens),
                [len(tokens)],
            )
        )

    def end(
        self,
        instance: str,
        attempt: int,
        total: int,
        *,
        reason: FinishReason = FinishReason.STOP,
        version: str = "v1",
    ) -> list[FleetCommand]:
        return self.happen(
            TurnEnded(self.now_s, InstanceId(instance), AttemptId(attempt), reason, total, version)
        )

    def watch(self, after_s: float) -> list[FleetCommand]:
        """Let time pass, then let the watch timer fire."""
        self.now_s += after_s
        return self.happen(TimerFired(self.now_s, WATCH))


def turn_spec(name: str, *, prompt: Sequence[int] = (1, 2, 3), **spec: Any) -> TurnSpec:
    return TurnSpec(
        turn=TurnId(name),
        trajectory=TrajectoryId(spec.pop("trajectory", name)),
        job=JobId(spec.pop("job", "job")),
        prompt=tuple(prompt),
        sampling=Sampling(max_tokens=spec.pop("max_tokens", 8), **spec.pop("sampling", {})),
        version=spec.pop("version", "v1"),
        base_model=spec.pop("base_model", "job"),
        **spec,
    )


def instance_spec(name: str, **spec: Any) -> InstanceSpec:
    return InstanceSpec(
        instance=InstanceId(name),
        kind=spec.pop("kind", InstanceKind.SPOT),
        max_running=spec.pop("max_running", 4),
        max_context_tokens=spec.pop("max_context_tokens", 1000),
        kv_tokens=spec.pop("kv_tokens", 4000),
        **spec,
    )


def only(kind: type[C], commands: Sequence[FleetCommand]) -> C:
    """The one command of that kind."""
    found = [command for command in commands if isinstance(command, kind)]
    assert len(found) == 1, f"{len(found)} {kind.__name__} in {commands}"
    return found[0]


def none_of(kind: type[C], commands: Sequence[FleetCommand]) -> bool:
    return not any(isinstance(command, kind) for command in commands)


def dispatches(commands: Sequence[FleetCommand]) -> list[DispatchTurn]:
    return [command for command in commands if isinstance(command, DispatchTurn)]
