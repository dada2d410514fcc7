"""Devices of nodes, and deployments' requests for them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slackwater.model.errors import ConfigError
from slackwater.model.ids import DeploymentId, DeviceId, NodeId

CPU, CUDA = "cpu", "cuda"


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator of a node, or one slice of its cores.

    Devices of one link `domain` communicate fast (NVLink, one socket). `visible` is what
    CUDA_VISIBLE_DEVICES must be for a process to see only this GPU. `hardware` identifies a
    physical GPU, whichever node reports it; it is empty for a slice of cores.
    """

    node: NodeId
    index: int
    kind: str = CPU
    memory_mb: int = 0
    domain: str = ""
    visible: str = ""
    cores: tuple[int, ...] = ()
    hardware: str = ""

    @property
    def device(self) -> DeviceId:
        return DeviceId(f"{self.node}/{self.kind}:{self.index}")


@dataclass(frozen=True, slots=True)
class DeploymentRequest:
    """A deployment requests `devices` of one node (`node`, or any), each with `memory_mb`.

    Deployments of one sharing `group` may own the same devices, as permits make them alternate.
    """

    deployment: DeploymentId
    devices: int = 1
    node: NodeId | None = None
    kind: str = CPU
    memory_mb: int = 0
    group: str = ""


def usable_devices(devices: Iterable[Device], setting: str) -> tuple[Device, ...]:
    """The devices that a service with this `--device` uses: `cpu`, `cuda` or `cuda:N`."""
    kind, _, index = setting.partition(":")
    return tuple(
        device
        for device in devices
        if device.kind == kind and (not index or device.index == int(index))
    )


def layout_sizes(layout: str, field: str = "layout") -> tuple[int, int]:
    """`tp` and `dp` of a layout such as `tp=2,dp=2`."""
    sizes: dict[str, int] = {}
    for part in filter(None, layout.split(",")):
        name, _, number = part.strip().partition("=")
        known = name in ("tp", "dp") and name not in sizes
        if not known or not number.isdecimal() or not 1 <= int(number[:9]) <= 4096:
            raise ConfigError.of(field, layout, "must be such as tp=2 or tp=2,dp=4")
        sizes[name] = int(number)
    return sizes.get("tp", 1), sizes.get("dp", 1)


def count_ranks(layout: str, field: str = "layout") -> int:
    """The number of ranks, and so of devices, of a layout."""
    tp, dp = layout_sizes(layout, field)
    return tp * dp


def layout_devices(layout: str, field: str) -> int:
    """Devices that a job with the layout needs; 0 without a layout means whole nodes."""
    return count_ranks(layout, field) if layout else 0


def core_slices(cores: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """`count` equal slices of a node's cores; more slices than cores share cores."""
    each = len(cores) // count
    if not each:
        return [(cores[number % len(cores)],) for number in range(count)]
    return [tuple(cores[number * each : (number + 1) * each]) for number in range(count)]
