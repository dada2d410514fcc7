"""Tiers of a deployment's state, and the names of its parts."""

from dataclasses import dataclass
from enum import Enum, IntEnum

from slackwater.model.errors import ConfigError, check_not_negative


class Tier(IntEnum):
    """From cold to active: a node's disk, its host memory, its device."""

    DISK = 0
    HOST = 1
    DEVICE = 2


class PartRole(Enum):
    """What happens to a part when its deployment leaves the device.

    KEPT is written back to the host. FROZEN never changes: it is copied to the host once and then
    dropped. SCRATCH is not stored, and zero on return (an empty gradient).
    """

    KEPT = "kept"
    FROZEN = "frozen"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True, order=True)
class StateKey:
    """A tensor by content, not by process: elements [start, stop) of a parameter, of a kind."""

    job: str
    model: str
    parameter: str
    kind: str
    start: int
    stop: int

    def __str__(self) -> str:
        whole = f"{self.job}/{self.model}/{self.kind}.{self.parameter}"
        return f"{whole}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One stored tensor: key, element type by PyTorch's name (`float32`), element size, role."""

    key: StateKey
    dtype: str
    element_bytes: int
    role: PartRole = PartRole.KEPT

    def __post_init__(self) -> None:
        if not 0 <= self.key.start < self.key.stop:
            raise ConfigError.of("state part", str(self.key), "must have at least one element")
        if self.element_bytes <= 0:
            raise ConfigError.of("element_bytes", self.element_bytes, "must be positive")

    @property
    def bytes(self) -> int:
        return (self.key.stop - self.key.start) * self.element_bytes


@dataclass(frozen=True, slots=True)
class ImageRange:
    """Bytes of a deployment's device image, and where they are in the host image `image`.

    `writes`: they are written back there when the deployment leaves the device.
    """

    image: str
    on_device: int
    on_host: int
    bytes: int
    writes: bool
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Registration:
    """A registered deployment: whether its state is blank, and where its bytes go."""

    blank: bool
    stretches: tuple[ImageRange, ...]
    device_bytes: int


@dataclass(frozen=True, slots=True)
class StateBudgets:
    """Bytes of each tier that a node reserves for managed state."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int = 0

    def __post_init__(self) -> None:
        check_not_negative("state: ", self, *self.__slots__)


# In an agent's environment: megabytes of each tier.
DEVICE_MB, HOST_MB, DISK_MB = (f"SLACKWATER_STATE_{tier}_MB" for tier in ("DEVICE", "HOST", "DISK"))


@dataclass(frozen=True, slots=True)
class ResidencySettings:
    """What every node of a service reserves for managed state, in megabytes (2**20 bytes). Without
    `host_mb` half of the node's memory.
    """

    device_mb: float
    host_mb: float | None = None
    disk_mb: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.device_mb < float("inf"):
            raise ConfigError.of("residency: device_mb", self.device_mb, "must be above 0")
        for name in ("host_mb", "disk_mb"):
            size = getattr(self, name)
            if size is not None and not 0 <= size < float("inf"):
                raise ConfigError.of(f"residency: {name}", size, "must not be negative")

    def environment(self) -> dict[str, str]:
        sizes = {DEVICE_MB: self.device_mb, HOST_MB: self.host_mb, DISK_MB: self.disk_mb}
        return {name: str(size) for name, size in sizes.items() if size is not None}
