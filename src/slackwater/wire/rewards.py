"""Messages to reward workers, which answer with `ActionPrinted` and `ActionFinished`."""

from typing import TypeAlias

import msgspec

from slackwater.model.action import GpuService
from slackwater.wire.frames import Message


class RewardFacts(msgspec.Struct, frozen=True):
    """A reward worker's devices, the memory of each, and the services staged in host memory.
    `failed` has the reasons for those that could not be staged.
    """

    node: str
    devices: list[str]
    device_mib: int
    services: list[GpuService] = msgspec.field(default_factory=list)
    failed: dict[str, str] = msgspec.field(default_factory=dict)


def failure(service: str, reason: str) -> str:
    """The error for a service that could not be staged. A retry does not help."""
    return f"service: {service!r} failed to load: {reason}; the operator must fix it and restart"


class RestoreService(Message, frozen=True):
    """Copy a service from host memory onto these devices."""

    service: str
    gpus: list[int]


class EvictService(Message, frozen=True):
    """Free the memory of a service on these devices."""

    service: str
    gpus: list[int]


class ScoreTokens(Message, frozen=True):
    """Score a text, given as raw u32 token ids, with a service on these devices."""

    attempt: int
    service: str
    gpus: list[int]
    tokens: bytes


ToRewards: TypeAlias = RestoreService | EvictService | ScoreTokens
