"""What reward workers are told; they answer with `ActionPrinted` and `ActionOver`."""

from typing import TypeAlias

import msgspec

from slackwater.model.action import GpuService
from slackwater.wire.frames import Message


class RewardFacts(msgspec.Struct, frozen=True):
    """What a reward worker brings: its devices, how much of a service each can hold, and the
    services in its host memory. `failed` has those that could not be brought there, with the
    reason.
    """

    node: str
    devices: list[str]
    device_mib: int
    services: list[GpuService] = msgspec.field(default_factory=list)
    failed: dict[str, str] = msgspec.field(default_factory=dict)


def failure(service: str, reason: str) -> str:
    """What is said of a service that could not be staged. Trying again does not help."""
    return f"service: {service!r} failed to load: {reason}; the operator must fix it and restart"


class RestoreService(Message, frozen=True):
    """Bring a service from host memory onto these devices."""

    service: str
    gpus: list[int]


class EvictService(Message, frozen=True):
    """Let go of the memory that a service has on these devices."""

    service: str
    gpus: list[int]


class ScoreTokens(Message, frozen=True):
    """Score a text, given as raw u32 token ids, by a service that lies on these devices."""

    attempt: int
    service: str
    gpus: list[int]
    tokens: bytes


ToRewards: TypeAlias = RestoreService | EvictService | ScoreTokens
