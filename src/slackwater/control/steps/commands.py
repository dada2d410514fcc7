"""What the step book asks for: of local engines, of trainers, and of the rollout manager."""

from slackwater.control.message import Message
from slackwater.control.rollout.commands import ReleaseInstance
from slackwater.control.rollout.events import (
    StepBegan,
    StepDropped,
    StepEnded,
    TrainerWaits,
    TrainerWanted,
)
from slackwater.control.steps.events import DevicesGranted
from slackwater.control.timer import SetTimer
from slackwater.model.ids import InstanceId
from slackwater.model.instance import InstanceSpec


class StartEngine(Message, frozen=True):
    """Let a resting local engine work: answered by `InstanceJoined`. `again`: within a step."""

    spec: InstanceSpec
    again: bool


class RestEngine(Message, frozen=True):
    """The local engine rests: its messages no longer count, and its process lives on. One that
    sleeps answers this order's number with `EngineRested`.
    """

    instance: InstanceId
    reason: str
    number: int | None = None


# What the rollout manager hears of steps are its own events.
StepReport = StepBegan | TrainerWanted | TrainerWaits | StepEnded | StepDropped
StepCommand = StartEngine | RestEngine | ReleaseInstance | DevicesGranted | SetTimer | StepReport
