"""The records of a node's states: every deployment and shared image, and which reads which."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slackwater.model.residency import StateBudgets, Tier
from slackwater.policy.state.admission import DeploymentNeeds, ImageSize, explain_refusal
from slackwater.policy.state.eviction import EvictionCandidate


@dataclass(slots=True)
class Record:
    """Where one deployment's state is.

    `tier` has the newest copy. `on_host` and `on_disk` say whether a whole image, perhaps an older
    one, is there. `blank`: nothing was ever computed. `following`: its move to the device follows
    its move to the host.

    `borrows` names the records whose images it reads on its way to the device. An `unowned` one (a
    frozen base, or a forgotten lender) goes with its last borrower. A base has no device bytes.
    `bereft`: that lender was lost, so this state exists on the device only.
    """

    name: str
    holder: str | None
    device_bytes: int
    host_bytes: int
    warm: bool
    borrows: tuple[str, ...] = ()
    unowned: bool = False
    bereft: str | None = None
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
    device: str = ""  # of the node, on which it runs

    @property
    def idle(self) -> bool:
        """Whether nothing runs on it, reads it or moves it."""
        return not (self.leases or self.readers or self.moving_to is not None or self.doomed)

    @property
    def is_base(self) -> bool:
        """Whether it is an image of frozen parts, which deployments share."""
        return self.device_bytes == 0

    @property
    def loading(self) -> bool:
        """Whether it moves to the device, and so reads the images that it borrows."""
        return self.following or self.moving_to is Tier.DEVICE

    @property
    def readable(self) -> bool:
        """Whether borrowers can read its image on the host."""
        stays = self.moving_to in (None, Tier.DEVICE) and not self.doomed
        return stays and self.tier >= Tier.HOST

    def size_on(self, tier: Tier) -> int:
        """Its bytes on the device, or as an image on the tiers below."""
        return self.device_bytes if tier is Tier.DEVICE else self.host_bytes

    @property
    def uses_device(self) -> bool:
        return self.following or Tier.DEVICE in (self.tier, self.moving_to)

    @property
    def uses_host(self) -> bool:
        return self.warm or self.tier >= Tier.HOST or self.moving_to is Tier.HOST

    @property
    def uses_disk(self) -> bool:
        return self.on_disk or self.moving_to is Tier.DISK


class ResidencyRecords(dict[str, Record]):
    """All records by name."""

    def bytes_in_use(self, tier: Tier, device: str = "") -> int:
        """Bytes in use or reserved on a tier, or on a device; a shared image counts once."""
        match tier:
            case Tier.DEVICE:
                here = (r for r in self.values() if r.uses_device and r.device == device)
                return sum(r.device_bytes for r in here)
            case Tier.HOST:
                return sum(r.host_bytes for r in self.values() if r.uses_host)
            case Tier.DISK:
                return sum(r.host_bytes for r in self.values() if r.uses_disk)

    def on(self, tier: Tier, device: str) -> list[Record]:
        """Those at least as warm as a tier that share its room: of the device, or all but the warm
        ones, whose images stay on the host.
        """
        return [
            r
            for r in self.values()
            if r.tier >= tier and (r.device == device if tier is Tier.DEVICE else not r.warm)
        ]

    def lenders(self, record: Record) -> Iterator[Record]:
        """The records whose images it reads to get to the device."""
        return (self[name] for name in record.borrows if name in self)

    def borrowers(self, record: Record) -> Iterator[Record]:
        return (r for r in self.values() if record.name in r.borrows)

    def pieces(self, record: Record) -> list[Record]:
        """What must be on the host before it moves to the device: its lenders, then itself."""
        if record.tier is Tier.DEVICE or record.loading:
            return [record]
        return [*self.lenders(record), record]

    def may_sink(self, record: Record) -> bool:
        """Whether it may be moved down: it is idle, and nobody loads from its image."""
        return record.idle and not any(r.loading for r in self.borrowers(record))

    def is_assembled(self, record: Record) -> bool:
        """Whether all its pieces are on the host."""
        lenders_ready = all(r.readable for r in self.lenders(record))
        return record.tier is Tier.DEVICE or (record.tier is Tier.HOST and lenders_ready)

    # ---- admission ----
    def find_misfit(
        self, budgets: StateBudgets, record: Record, brought: Sequence[Record]
    ) -> str | None:
        """Why the node can never keep it beside the others; those being removed do not count."""
        kept = [r for r in self.values() if not r.doomed or r.name in record.borrows]
        doomed = [r.name for r in kept if r.doomed and not r.is_base]
        if doomed:
            return f"{doomed[0]}, which it shares, is being forgotten"
        images = {
            r.name: ImageSize(r.host_bytes, r.warm or (record.warm and r.name in record.borrows))
            for r in (*kept, *brought, record)
        }
        return explain_refusal(
            budgets,
            images,
            [DeploymentNeeds(r.device_bytes, (*r.borrows, r.name)) for r in kept if not r.doomed],
            DeploymentNeeds(record.device_bytes, (*record.borrows, record.name)),
        )

    def explain_no_room(
        self, budgets: StateBudgets, record: Record, brought: Sequence[Record]
    ) -> str | None:
        """Why there is no host memory for a warm one now; others are not evicted for it."""
        if not record.warm:
            return None
        cold = [r for r in self.lenders(record) if not r.uses_host]
        need = sum(r.host_bytes for r in (*cold, *brought, record))
        free = budgets.host_bytes - self.bytes_in_use(Tier.HOST)
        if need <= free:
            return None
        return (
            f"needs {need} bytes of host memory now, {free} of {budgets.host_bytes} are free; "
            "evict another first"
        )


@dataclass(frozen=True, slots=True)
class ResidencyWait:
    """Somebody waits for a deployment to be at least (`up`) or at most as warm as a tier."""

    ticket: int
    deployment: str
    tier: Tier
    up: bool
    lease: bool


def candidates_on(
    tier: Tier,
    records: ResidencyRecords,
    waits: Sequence[ResidencyWait],
    hint: Sequence[str],
    wait: ResidencyWait | None,
    device: str = "",
) -> list[EvictionCandidate]:
    """Records that may be evicted from the tier (the device tier: from `device`) to make room for
    `wait`, or for a prefetch if that is None. A shared image counts as used when a borrower is.
    """
    order = {name: number for number, name in reversed(list(enumerate(hint)))}
    wanted = {w.deployment for w in waits if w.up}
    if tier is Tier.HOST:
        wanted = _find_wanted_on_host(records, waits, wait)
    found = []
    for r in records.on(tier, device):
        if r.name in wanted or r.stuck or not records.may_sink(r):
            continue
        users = (r, *records.borrowers(r))
        used_s = max(user.last_used_s for user in users)
        next_use = min((order[u.name] for u in users if u.name in order), default=None)
        found.append(EvictionCandidate(r.name, r.size_on(tier), used_s, next_use))
    return found


def _find_wanted_on_host(
    records: ResidencyRecords, waits: Sequence[ResidencyWait], by: ResidencyWait | None
) -> set[str]:
    """Records that stay since a request waits for them. A request after `by` releases its host
    images while one of its pieces is missing: else both would wait for ever.
    """
    found: set[str] = set()
    later = False
    for wait in waits:
        pieces = records.pieces(records[wait.deployment]) if wait.up else []
        coming = all(r.tier >= Tier.HOST or r.moving_to is Tier.HOST for r in pieces)
        if coming or not later:
            found.update(r.name for r in pieces)
        later = later or wait is by
    return found
