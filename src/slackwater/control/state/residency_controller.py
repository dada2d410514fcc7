"""The residency controller of one node: decides on which tier each state is (PlexRL 4.5.1).

    events -> controller.handle(event) -> commands

A state moves one tier at a time; from disk to the device the second move may follow the first. On
the device it keeps its place on the host and the last image there, so that a worker's death loses
only what was computed since. Waits are served in order. Budgets hold at every moment, moves
included. What deployments share (a frozen base) is one record, used when any of them is.
"""

from collections.abc import Sequence
from typing import assert_never

from slackwater.control.state import commands, events
from slackwater.control.state.record import Record, ResidencyRecords, ResidencyWait, candidates_on
from slackwater.model.residency import StateBudgets, Tier
from slackwater.policy.state.eviction import choose_victims, may_evict

Room = tuple[Tier, str]  # a tier of the node, or one of its devices
Claim = ResidencyWait | int  # somebody waits, or the hint names it at this place


class ResidencyController:
    """See the module."""

    def __init__(self, budgets: StateBudgets) -> None:
        self.budgets = budgets
        self._records = ResidencyRecords()
        self._waits: list[ResidencyWait] = []
        self._hint: tuple[str, ...] = ()
        self._holding: tuple[str, ...] = ()
        self.found = self.waited = 0  # operations whose state was there, or not
        self.early = 0  # loads that ended before anybody waited for them
        self._out: list[commands.StateCommand] = []

    def tier(self, deployment: str) -> Tier | None:
        """Where the newest copy is; None if the deployment is not known."""
        record = self._records.get(deployment)
        return None if record is None else record.tier

    def is_blank(self, deployment: str) -> bool:
        """Whether nothing was ever computed on it, or it is not known."""
        record = self._records.get(deployment)
        return record is None or record.blank

    def bytes_in_use(self, tier: Tier, device: str = "") -> int:
        """Bytes in use or reserved on a tier."""
        return self._records.bytes_in_use(tier, device)

    def handle(self, event: events.StateEvent) -> Sequence[commands.StateCommand]:
        self._out = []
        match event:
            case events.DeploymentRegistered():
                self._register(event)
            case events.ResidencyAsked(_, ticket, name, tier, lease):
                self._wait(ResidencyWait(ticket, name, tier, True, lease), event.now_s)
            case events.EvictionAsked(_, ticket, name, tier):
                self._unhint(name)
                self._wait(ResidencyWait(ticket, name, tier, False, False), event.now_s)
            case events.MoveDone(_, name, to):
                self._finish_move(name, to)
            case events.MoveFailed(_, name, to, reason):
                self._fail_move(name, to, reason)
            case events.NextHinted(_, names, holding):
                self._hint, self._holding = names, holding
            case events.HolderGone(_, holder):
                self._holder_gone(holder)
            case events.DeploymentForgotten(_, name):
                self._forget(name)
            case _:
                self._note(event)
        self._serve(event.now_s)
        self._prefetch()
        return self._out

    def _note(self, event: events.NotedEvent) -> None:
        """Handle events that only change a record."""
        match event:
            case events.WaitGivenUp(_, ticket):
                self._waits = [wait for wait in self._waits if wait.ticket != ticket]
            case events.DeploymentFilled(_, name):
                self._record_fill(name)
            case events.LeaseReleased(now_s, name):
                self._release(name, now_s)
            case events.ReadingBegan(_, name):
                self._read(name, 1)
            case events.ReadingEnded(_, name):
                self._read(name, -1)
            case _:
                assert_never(event)

    def _register(self, event: events.DeploymentRegistered) -> None:
        known = self._records.get(event.deployment)
        if known is not None:
            again = (known.device_bytes, known.host_bytes) == (event.device_bytes, event.host_bytes)
            if known.holder is not None or known.doomed or known.bereft or not again:
                why = "is held by " + known.holder if known.holder else "has another size here"
                why = f"{known.bereft}, which it shares, is gone" if known.bereft else why
                self._refuse(event.deployment, why)
                return
            known.holder, known.device, known.unowned = event.holder, event.device, False
            self._out.append(commands.Admit(event.deployment, known.blank))
            return
        record = Record(
            event.deployment,
            event.holder,
            event.device_bytes,
            event.host_bytes,
            event.warm,
            borrows=tuple(name for name, _ in event.borrows),
            device=event.device,
        )
        record.last_used_s = event.now_s
        brought = [
            Record(name, None, 0, size, record.warm, unowned=True)
            for name, size in event.borrows
            if name not in self._records
        ]
        beside = (self.budgets, record, brought)
        reason = self._records.find_misfit(*beside) or self._records.explain_no_room(*beside)
        if reason:
            self._refuse(record.name, reason)
            return
        for new in (*brought, record):
            self._records[new.name] = new
        for lender in self._records.lenders(record):
            if lender.is_base:
                lender.doomed = False
                lender.warm = lender.warm or record.warm
        self._out.append(commands.Admit(record.name, blank=True))

    def _refuse(self, deployment: str, why: str) -> None:
        self._out.append(commands.Refuse(deployment, f"state of {deployment}: {why}"))

    def _wait(self, wait: ResidencyWait, now_s: float) -> None:
        record, state = self._records.get(wait.deployment), f"state of {wait.deployment}"
        if record is None or record.doomed:
            self._out.append(commands.AnswerTicket(wait.ticket, f"{state}: is not known here"))
        elif wait.up and wait.tier is Tier.DEVICE and record.holder is None:
            self._out.append(commands.AnswerTicket(wait.ticket, f"{state}: its worker has gone"))
        else:
            record.last_used_s = now_s
            for piece in self._records.pieces(record):
                piece.stuck = None
            there = record.tier is Tier.DEVICE and record.moving_to is None
            self.found += wait.lease and there
            self.waited += wait.lease and not there
            self._waits.append(wait)

    def _unhint(self, name: str) -> None:
        """Remove it from the hint: it runs, or must be evicted."""
        at = self._hint.index(name) if name in self._hint else len(self._hint)
        self._hint = self._hint[:at] + self._hint[at + 1 :]

    def _release(self, name: str, now_s: float) -> None:
        record = self._records.get(name)
        if record is not None and record.leases:
            record.leases -= 1
            record.last_used_s = now_s

    def _read(self, name: str, change: int) -> None:
        record = self._records.get(name)
        if record is not None:
            record.readers = max(record.readers + change, 0)

    def _record_fill(self, name: str) -> None:
        record = self._records.get(name)
        if record is not None and record.tier is Tier.HOST:
            record.blank, record.on_host = False, True

    def _finish_move(self, name: str, to: Tier) -> None:
        record = self._records.get(name)
        if record is None or record.moving_to is not to:
            return
        down = record.tier > to
        record.tier, record.moving_to, record.stuck = to, None, None
        if record.following:  # the move that follows goes on by itself
            record.following, record.moving_to = False, Tier.DEVICE
        match to:
            case Tier.DEVICE:
                record.blank = False
                self.early += not any(w.up and w.deployment == name for w in self._waits)
                for base in self._records.lenders(record):
                    if base.is_base and base.blank:
                        base.blank, base.on_host = False, True  # filled on the way
                if record.on_disk:  # it is about to differ
                    record.on_disk = False
                    self._out.append(commands.FreeTier(name, Tier.DISK))
            case Tier.HOST:
                record.on_host = not record.blank
            case Tier.DISK:
                record.on_disk = down and not record.blank
                record.on_host = False
                self._out.append(commands.FreeTier(name, Tier.HOST))
        if record.doomed:
            self._forget(name)
        for other in self._records.values():  # room was made, or may have been
            if down and other is not record:
                other.stuck = None

    def _fail_move(self, name: str, to: Tier, reason: str) -> None:
        record = self._records.get(name)
        if record is None:
            return
        if to is Tier.DEVICE and record.following:
            record.following = False
        elif record.moving_to is to:
            record.moving_to, record.following, record.stuck = None, False, reason
        else:
            return
        if record.doomed:
            self._forget(name)
            return
        for wait in list(self._waits):
            wanted = self._records[wait.deployment]
            pieces = self._records.pieces(wanted) if wait.up else [wanted]
            if record in pieces and (to > record.tier) == wait.up:
                self._answer(wait, reason)

    def _holder_gone(self, holder: str) -> None:
        for record in [r for r in self._records.values() if r.holder == holder]:
            record.holder, record.leases, record.following = None, 0, False
            touched = record.tier is Tier.DEVICE or record.moving_to is Tier.DEVICE
            for wait in [w for w in self._waits if w.deployment == record.name]:
                if wait.tier is Tier.DEVICE or touched:
                    self._answer(wait, f"state of {record.name}: its worker has gone")
            if not touched:
                continue
            was_newest = record.tier is Tier.DEVICE
            record.moving_to = None
            record.tier = Tier.HOST
            if record.doomed:
                self._forget(record.name)
            elif not was_newest:
                continue  # it was only on its way there
            elif record.on_host:
                self._out.append(commands.ReportFallback(record.name))
            else:
                self._forget(record.name, lost=True)
                self._out.append(commands.ReportStateLost(record.name))

    def _forget(self, name: str, *, lost: bool = False) -> None:
        """Remove it once nothing moves or reads it; a borrowed one goes with its last borrower."""
        record = self._records.get(name)
        if record is None:
            return
        for wait in [w for w in self._waits if w.deployment == name]:
            self._answer(wait, f"state of {name}: was forgotten")
        for borrower in self._records.borrowers(record):
            if lost:
                borrower.bereft = name
                borrower.borrows = tuple(n for n in borrower.borrows if n != name)
        if any(self._records.borrowers(record)):
            record.unowned = True
            return
        if record.moving_to is not None or record.readers:
            record.doomed = True
        else:
            self._remove(record)

    def _remove(self, record: Record) -> None:
        name = record.name
        del self._records[name]
        if record.tier is Tier.DEVICE:
            self._out.append(commands.FreeTier(name, Tier.DEVICE))
        if record.tier >= Tier.HOST:
            self._out.append(commands.FreeTier(name, Tier.HOST))
        if record.on_disk:
            self._out.append(commands.FreeTier(name, Tier.DISK))
        self._out.append(commands.Drop(name))
        for lender in list(self._records.lenders(record)):
            if lender.unowned:
                self._forget(lender.name)
        for other in self._records.values():
            other.stuck = None

    def _answer(self, wait: ResidencyWait, refused: str | None = None) -> None:
        self._waits.remove(wait)
        self._out.append(commands.AnswerTicket(wait.ticket, refused))

    def _serve(self, now_s: float) -> None:
        """Answer and advance the requests, oldest first; later ones do not take its room."""
        for doomed in [r for r in self._records.values() if r.doomed]:
            if not doomed.readers:
                self._forget(doomed.name)
        full: set[Room] = set()
        for wait in list(self._waits):
            record = self._records.get(wait.deployment)
            if record is None or wait not in self._waits:
                continue
            if wait.up:
                self._serve_up(wait, record, full)
                if wait not in self._waits:
                    record.last_used_s = now_s
            else:
                self._serve_down(wait, record)

    def _serve_up(self, wait: ResidencyWait, record: Record, full: set[Room]) -> None:
        if record.bereft and record.tier is not Tier.DEVICE:
            why = f"state of {record.name}: {record.bereft}, which it shares, is gone"
            self._answer(wait, why)
            return
        there = record.moving_to is None and record.tier >= wait.tier
        if there and self._records.is_assembled(record):
            record.leases += wait.lease
            if wait.lease:
                self._unhint(record.name)
            self._answer(wait)
            return
        on_disk = [p for p in self._records.pieces(record) if p.tier is Tier.DISK]
        for piece in [p for p in on_disk if p.moving_to is None]:
            if not self._raise_for(wait, piece, Tier.HOST, full):
                return
        if record.moving_to is not None:
            self._follow(wait, record, full)
        elif wait.tier is Tier.DEVICE and self._records.is_assembled(record):
            self._raise_for(wait, record, Tier.DEVICE, full)

    def _serve_down(self, wait: ResidencyWait, record: Record) -> None:
        if record.moving_to is not None:
            return
        if record.tier > wait.tier and self._records.may_sink(record):
            self._sink(record)
        if wait in self._waits and record.tier <= wait.tier and record.moving_to is None:
            self._answer(wait)

    def _raise_for(self, wait: ResidencyWait, piece: Record, to: Tier, full: set[Room]) -> bool:
        room = _room(to, piece)
        if room not in full and self._rise(piece, to, wait):
            return True
        full.add(room)
        self._give_up_if_hopeless(wait, room)
        return False

    def _follow(self, wait: ResidencyWait, record: Record, full: set[Room]) -> None:
        """Start the move to the device while the state still arrives from disk."""
        coming = record.tier is Tier.DISK and record.moving_to is Tier.HOST
        if not (coming and wait.up and wait.tier is Tier.DEVICE and record.holder is not None):
            return
        room = _room(Tier.DEVICE, record)
        if record.following or record.blank or record.doomed or room in full:
            return
        if not all(lender.readable for lender in self._records.lenders(record)):
            return
        if self._make_room(record, Tier.DEVICE, wait):
            record.following = True
            self._out.append(commands.MoveTier(record.name, Tier.DEVICE, follows=True))
        else:
            full.add(room)

    def _give_up_if_hopeless(self, wait: ResidencyWait, room: Room) -> None:
        """Refuse the request if nothing can be evicted, for example because the disk is full."""
        others = self._records.on(*room)
        above = [r for r in others if r.stuck]
        busy = [r for r in others if not self._records.may_sink(r)]
        if above and not busy:
            self._answer(wait, f"state of {wait.deployment}: no room: {above[0].stuck}")

    def _rise(self, record: Record, to: Tier, by: Claim) -> bool:
        """Begin the move if there is room, else begin evictions; False if it must wait."""
        if not self._make_room(record, to, by):
            return False
        record.moving_to = to
        self._out.append(commands.MoveTier(record.name, to, record.blank))
        return True

    def _make_room(self, record: Record, to: Tier, by: Claim) -> bool:
        """Whether there is room; if not, begin evictions: a prefetch of what is used later."""
        wait = None if isinstance(by, int) else by
        need = record.size_on(to)
        if to is Tier.HOST and record.warm:
            need = 0  # reserved
        room = _room(to, record)
        free = self._budget(to) - self.bytes_in_use(*room)
        if need <= free:
            return True
        freeing = sum(
            r.size_on(to)
            for r in self._records.on(*room)
            if r.moving_to is not None and r.moving_to < r.tier
        )
        candidates = [
            c
            for c in candidates_on(to, self._records, self._waits, self._hint, wait, room[1])
            if not isinstance(by, int) or (may_evict(c, by) and c.name not in self._holding)
        ]
        for name in choose_victims(candidates, need - free - freeing) or ():
            self._sink(self._records[name])
        # Where the image below was still good, room is there at once.
        return self._budget(to) - self.bytes_in_use(*room) >= need

    def _sink(self, record: Record) -> None:
        """Move it one tier down; a host image that is also on disk is only freed."""
        to = Tier(record.tier - 1)
        if to is Tier.DISK and (record.on_disk or record.blank):
            record.tier, record.on_host = Tier.DISK, False
            self._out.append(commands.FreeTier(record.name, Tier.HOST))
            return
        if (
            to is Tier.DISK
            and self.bytes_in_use(Tier.DISK) + record.host_bytes > self.budgets.disk_bytes
        ):
            record.stuck = f"the disk tier has {self.budgets.disk_bytes} bytes, all in use"
            for wait in [w for w in self._waits if w.deployment == record.name and not w.up]:
                self._answer(wait, f"state of {record.name}: {record.stuck}")
            return
        record.moving_to = to
        if to is Tier.HOST:
            record.on_host = False  # being overwritten
        self._out.append(commands.MoveTier(record.name, to, record.blank))

    def _prefetch(self) -> None:
        """Load what the hint names, unless a request needs the room or something sooner goes."""
        wanted = [self._records[w.deployment] for w in self._waits if w.up]
        waiting = {_room(w.tier, self._records[w.deployment]) for w in self._waits if w.up} | {
            _room(Tier.HOST, p)
            for r in wanted
            for p in self._records.pieces(r)
            if p.tier is Tier.DISK
        }
        leaving = {w.deployment for w in self._waits if not w.up}
        for number, name in enumerate(self._hint):
            record = None if name in leaving else self._records.get(name)
            if record is None or not record.idle or record.holder is None or record.bereft:
                continue
            pieces = self._records.pieces(record)
            if record.tier is Tier.DEVICE or any(piece.stuck for piece in pieces):
                continue
            for piece in [p for p in pieces if p.tier is Tier.DISK and p.idle]:
                blocked = _room(Tier.HOST, piece) in waiting
                if blocked or not self._rise(piece, Tier.HOST, number):
                    return
            if record.idle and self._records.is_assembled(record):
                to = Tier.DEVICE
                blocked = _room(to, record) in waiting
                if blocked or not self._rise(record, to, number):
                    return

    def _budget(self, tier: Tier) -> int:
        return self.budgets.device_bytes if tier is Tier.DEVICE else self.budgets.host_bytes


def _room(tier: Tier, record: Record) -> Room:
    """The room that it needs: on its device, or on a tier of the whole node."""
    return tier, record.device if tier is Tier.DEVICE else ""
