"""What may leave a tier of the node: what nobody runs, reads, loads from or waits for."""

from collections.abc import Sequence

from slackwater.control.state.record import ResidencyRecords, ResidencyWait
from slackwater.model.residency import Tier
from slackwater.policy.state.eviction import EvictionCandidate


def candidates_on(
    tier: Tier,
    records: ResidencyRecords,
    waits: Sequence[ResidencyWait],
    hint: Sequence[str],
    wait: ResidencyWait | None,
    device: str = "",
) -> list[EvictionCandidate]:
    """What may leave the tier to make room for `wait`, or for an early load if that is None: on the
    node's `device` alone, if that is the tier.

    What is shared is used when any of its borrowers is.
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
    """What stays because somebody waits for it.

    A wait later than `by` lets its host images go while a missing piece cannot come before `by` is
    served: else the two would wait for each other.
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
