"""One deployment in the book of states."""

from dataclasses import dataclass

from slackwater.model.residency import Tier


@dataclass(slots=True)
class Record:
    """Where one deployment's state is.

    `tier` has the newest copy. `on_host` and `on_disk` say whether a whole image is there, perhaps an older one than the device's;
    an image that is being overwritten is not whole. `blank`: nothing was ever computed. `following`: beside its move to the host,
    its move to the device is under way.
    """

    name: str
    holder: str | None
    device_bytes: int
    host_bytes: int
    warm: bool
    tier: Tier = Tier.DISK
    blank: bool = True
    on_host: bool = False
    on_disk: bool = False
    moving_to: Tier | None = None
    following: bool = False
    leases: int = 0
    readers: int = 0
    last_used_s: float = 0.0
    stuck: str | None = None
    doomed: bool = False

    @property
    def idle(self) -> bool:
        """Whether it may be moved down: nothing runs on it, reads it or moves it."""
        return not (self.leases or self.readers or self.moving_to is not None or self.doomed)

    @property
    def uses_device(self) -> bool:
        return self.following or Tier.DEVICE in (self.tier, self.moving_to)

    @property
    def uses_host(self) -> bool:
        return self.warm or self.tier >= Tier.HOST or self.moving_to is Tier.HOST

    @property
    def uses_disk(self) -> bool:
        return self.on_disk or self.moving_to is Tier.DISK


@dataclass(frozen=True, slots=True)
class Wait:
    """Somebody waits for a deployment to be at least (`up`) or at most as warm as a tier."""

    ticket: int
    deployment: str
    tier: Tier
    up: bool
    lease: bool
