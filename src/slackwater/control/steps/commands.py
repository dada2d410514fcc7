"""Commands of the step tracker, to local engines, trainers and the rollout manager."""

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
    """Let a resting local engine work; `InstanceJoined` follows. `again`: within a step."""

    spec: InstanceSpec
    again: bool


class RestEngine(Message, frozen=True):
    """Let a local engine rest: its messages no longer count, but its process stays. An engine that
    sleeps reports `EngineRested` with the order's number.
    """

    instance: InstanceId
    reason: str
    number: int | None = None


# The rollout manager consumes these as its own events.
StepReport = StepBegan | TrainerWanted | TrainerWaits | StepEnded | StepDropped
StepCommand = StartEngine | RestEngine | ReleaseInstance | DevicesGranted | SetTimer | StepReport
