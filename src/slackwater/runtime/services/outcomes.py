"""Finds how a request ended: on the board of recent ones, else in the store."""

import sqlalchemy as sa

from slackwater.model.errors import NotFoundError
from slackwater.model.ids import RequestId, TenantId
from slackwater.model.operation import FaultOwner
from slackwater.runtime.services.sampling import KIND as SAMPLE
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.outcomes import FutureBoard, RequestOutcome
from slackwater.runtime.store.schema import operations, samples


async def find_outcome(
    store: Store, board: FutureBoard, tenant: TenantId, request: RequestId, hold_s: float
) -> RequestOutcome | None:
    """How a request ended; None if not within `hold_s`. Not the tenant's: NotFoundError."""
    holder = board.tenant_of(request)
    if holder is None:
        return await _read_outcome(store, tenant, request)
    if holder != tenant:
        raise _unknown_request(request)
    if not await board.wait(request, hold_s):
        return None
    return board.recent(request) or await _read_outcome(store, tenant, request)


async def _read_outcome(store: Store, tenant: TenantId, request: RequestId) -> RequestOutcome:
    """The stored outcome of a request that is not on the board any more."""
    table = samples if request.startswith("sm-") else operations
    kind = sa.literal(SAMPLE) if table is samples else operations.c.kind
    columns = table.c
    query = sa.select(
        columns.tenant, kind.label("kind"), columns.result, columns.error, columns.owner
    ).where(columns.request == request)
    row = await store.call(lambda c: c.execute(query).first())
    if row is None or row.tenant != tenant:
        raise _unknown_request(request)
    owner = None if row.owner is None else FaultOwner(row.owner)
    return RequestOutcome(row.kind, row.result, row.error, owner)


def _unknown_request(request: RequestId) -> NotFoundError:
    return NotFoundError(f"request_id: {request!r} is not a request of yours, or has expired")
