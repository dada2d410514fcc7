"""The durable log of operations and models: functions run on the store's thread."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from slackwater.model.errors import RefusedError
from slackwater.model.ids import ModelId, RequestId, TenantId
from slackwater.model.operation import Operation, OperationRecord, OpKind, OpStatus
from slackwater.model.session import LoraShape, TrainedModel
from slackwater.runtime.store.outcomes import RequestOutcome
from slackwater.runtime.store.schema import models, operation_payloads, operations

_MODEL_COLUMNS = ("model", "session", "tenant", "model_seq", "base_model", "seed", "created_s")
# Made once: making a statement takes longer than executing it.
_NUMBERED = sa.select(operations.c.request, operations.c.kind, operations.c.digest).where(
    operations.c.model == sa.bindparam("of_model"), operations.c.seq == sa.bindparam("number")
)
_ADD, _ADD_PAYLOAD = operations.insert(), operation_payloads.insert()
_FINISH = operations.update().where(operations.c.request == sa.bindparam("finished"))


def digest_of(payload: bytes) -> str:
    """A digest that tells a retry from another operation with the same number."""
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Submission:
    """An operation as it comes in. `strict` is off where a retry may honestly differ."""

    operation: Operation
    tenant: TenantId
    payload: bytes
    now_s: float
    strict: bool = True


def add_operation(connection: Connection, new: Submission) -> tuple[RequestId, bool]:
    """Save an operation, and True; if its number is taken, the request that has it, and False."""
    op = new.operation
    found = connection.execute(_NUMBERED, {"of_model": op.model, "number": op.seq}).first()
    digest = digest_of(new.payload)
    if found is not None:
        if found.kind != op.kind or (new.strict and found.digest != digest):
            raise RefusedError(
                f"seq_id: {op.seq} of model {op.model} was sent before as another {found.kind}"
            )
        return RequestId(found.request), False
    row = {
        "request": op.request,
        "model": op.model,
        "tenant": new.tenant,
        "seq": op.seq,
        "kind": op.kind.value,
        "digest": digest,
        "status": OpStatus.WAITING.value,
        "created_s": new.now_s,
    }
    connection.execute(_ADD, row)
    connection.execute(_ADD_PAYLOAD, {"request": op.request, "payload": new.payload})
    return op.request, True


def add_rejection(connection: Connection, new: Submission, reason: str) -> bool:
    """Save a refused submission, which uses up its number; False if the number was taken."""
    _, added = add_operation(connection, new)
    if added:
        finish_operation(
            connection,
            new.operation.request,
            RequestOutcome(new.operation.kind, None, reason),
            new.now_s,
        )
    return added


def finish_operation(
    connection: Connection, request: RequestId, outcome: RequestOutcome, now_s: float
) -> None:
    connection.execute(_FINISH, {"finished": request, **outcome.columns(now_s)})


def payload_of(connection: Connection, request: RequestId) -> bytes:
    payload = sa.select(operation_payloads.c.payload)
    found = connection.execute(payload.where(operation_payloads.c.request == request))
    return bytes(found.scalar_one())


def forget_replayed(connection: Connection, model: ModelId, seq: int) -> None:
    """The state after `seq` is saved: operations up to it will not be replayed."""
    connection.execute(models.update().where(models.c.model == model).values(saved_seq=seq))
    _forget_payloads(
        connection,
        operations.c.model == model,
        operations.c.seq <= seq,
        operations.c.status != OpStatus.WAITING.value,
    )


def drop_orphans(connection: Connection, oldest_s: float) -> None:
    """Operations of models that are closed, once their results would have expired."""
    closed = sa.select(models.c.model).where(models.c.closed.is_not(None))
    of_them = (operations.c.created_s < oldest_s, operations.c.model.in_(closed))
    _forget_payloads(connection, *of_them)
    connection.execute(operations.delete().where(*of_them))


def _forget_payloads(connection: Connection, *of_operations: sa.ColumnElement[bool]) -> None:
    named = sa.select(operations.c.request).where(*of_operations)
    connection.execute(operation_payloads.delete().where(operation_payloads.c.request.in_(named)))


def add_model(connection: Connection, model: TrainedModel, user_metadata: Any) -> None:
    """Nothing changes if it is there."""
    known = connection.execute(sa.select(models.c.model).where(models.c.model == model.model))
    if known.first() is not None:
        return
    row = {name: getattr(model, name) for name in _MODEL_COLUMNS}
    metadata = json.dumps(user_metadata)
    new = models.insert().values(**row, **lora_columns(model.lora), user_metadata=metadata)
    connection.execute(new)


def model_of(row: Row[Any]) -> TrainedModel:
    plain = {name: getattr(row, name) for name in _MODEL_COLUMNS}
    return TrainedModel(**plain, lora=lora_of(row))


def lora_columns(lora: LoraShape) -> dict[str, Any]:
    flags = {name: getattr(lora, name) for name in ("train_attn", "train_mlp", "train_unembed")}
    return {"lora_rank": lora.rank, **flags}


def lora_of(row: Row[Any]) -> LoraShape:
    return LoraShape(row.lora_rank, row.train_attn, row.train_mlp, row.train_unembed)


def records_after(
    connection: Connection, model: ModelId, saved_seq: int | None
) -> tuple[OperationRecord, ...]:
    """What is not in the saved state, in order."""
    columns = operations.c
    rows = connection.execute(
        sa.select(columns.request, columns.seq, columns.kind, columns.status)
        .where(columns.model == model, columns.seq > (-1 if saved_seq is None else saved_seq))
        .order_by(columns.seq)
    )
    return tuple(
        OperationRecord(
            Operation(RequestId(row.request), model, row.seq, OpKind(row.kind)),
            OpStatus(row.status),
        )
        for row in rows
    )
