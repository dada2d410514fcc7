"""Whether a deployment is taken into the book, with what it borrows."""

from collections.abc import Sequence

from slackwater.control.state.record import Record, ResidencyRecords
from slackwater.model.residency import StateBudgets, Tier
from slackwater.policy.state.admission import DeploymentNeeds, ImageSize, refusal


def misfit(
    records: ResidencyRecords, budgets: StateBudgets, record: Record, brought: Sequence[Record]
) -> str | None:
    """Why the node can never keep it beside the others. Those that are going do not count."""
    kept = [r for r in records.values() if not r.doomed or r.name in record.borrows]
    doomed = [r.name for r in kept if r.doomed and not r.is_base]
    if doomed:
        return f"{doomed[0]}, which it shares, is being forgotten"
    images = {
        r.name: ImageSize(r.host_bytes, r.warm or (record.warm and r.name in record.borrows))
        for r in (*kept, *brought, record)
    }
    return refusal(
        budgets,
        images,
        [DeploymentNeeds(r.device_bytes, (*r.borrows, r.name)) for r in kept if not r.doomed],
        DeploymentNeeds(record.device_bytes, (*record.borrows, record.name)),
    )


def explain_no_room(
    records: ResidencyRecords, budgets: StateBudgets, record: Record, brought: Sequence[Record]
) -> str | None:
    """Why a warm one cannot have its place at once; spilling others for it is not waited for."""
    if not record.warm:
        return None
    cold = [r for r in records.lenders(record) if not r.uses_host]
    need = sum(r.host_bytes for r in (*cold, *brought, record))
    free = budgets.host_bytes - records.bytes_in_use(Tier.HOST)
    if need <= free:
        return None
    return (
        f"needs {need} bytes of host memory now, {free} of {budgets.host_bytes} are free; "
        "evict another first"
    )
