"""Training operations: feeds requests to the controller, and sends its commands to trainers.

An operation is acknowledged when it is in the durable log, and its outcome is answered when that is
durable. The controller decides everything else.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import sqlalchemy as sa
from msgspec import structs
from sqlalchemy.engine import Connection

from slackwater.control.operations import commands, events
from slackwater.control.operations.controller import OperationsController
from slackwater.model.errors import (
    ConfigError,
    NotFoundError,
    RefusedError,
    SlackwaterError,
    UnavailableError,
)
from slackwater.model.ids import JobId, ModelId, NodeId, RequestId, SessionId, TenantId, WorkerId
from slackwater.model.operation import FaultOwner, Operation, OpKind
from slackwater.model.session import TrainedModel
from slackwater.model.tenant_limits import TenantTable
from slackwater.runtime.executors.state_moves import StateMoves
from slackwater.runtime.live_driver import FleetDriver, loop_time
from slackwater.runtime.net.background import Background
from slackwater.runtime.net.hub import WorkerHub
from slackwater.runtime.store import operation_log as log
from slackwater.runtime.store.base_models import BaseModels
from slackwater.runtime.store.checkpoints import check_room, remove_folder
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.op_payloads import (
    decode_load,
    decode_optim,
    decode_publish,
    decode_save,
)
from slackwater.runtime.store.outcomes import FutureBoard, RequestOutcome
from slackwater.runtime.store.schema import models
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.wire import messages
from slackwater.wire.agent import StateSent

logger = logging.getLogger(__name__)

# What a finished save or publish adds to the log in the same transaction, and its answer.
Finisher = Callable[[Connection, TrainedModel, Operation, bytes], bytes]


OperationCommand: TypeAlias = (
    commands.TrainerOrder
    | commands.CommitSnapshot
    | commands.DropModel
    | commands.MoveState
    | commands.ForgetStrays
    | commands.CompleteOp
    | commands.FailOp
)


class TrainerExecutor:
    """All trainers of a service. `controller` is only read; events go through the driver."""

    def __init__(
        self,
        driver: FleetDriver,
        controller: OperationsController,
        *,
        store: Store,
        board: FutureBoard,
        hub: WorkerHub,
        state: StateDirectory,
        bases: BaseModels,
        background: Background,
        moves: StateMoves,
        job_of: Callable[[SessionId], JobId],
        node_of: Callable[[WorkerId], NodeId | None],
        stock: Callable[[], bool],
        finisher: Finisher,
        finished: Callable[[TrainedModel, Operation, bytes], None],
        limits: TenantTable,
        max_payload_bytes: int,
    ) -> None:
        """`stock` says whether relays need versions; `max_payload_bytes` limits what waits per
        tenant.
        """
        self._controller, self._feed = controller, driver.feed
        self._store, self._board, self._hub = store, board, hub
        self._state, self._bases, self._background = state, bases, background
        self.moves, self._job_of, self._node_of, self._stock = moves, job_of, node_of, stock
        self._finisher, self._finished, self._limits = finisher, finished, limits
        self._results: dict[int, bytes] = {}  # by ticket, while the controller handles it
        self._models: dict[ModelId, TrainedModel] = {}
        self._payloads: dict[RequestId, bytes] = {}
        self._payload_bytes: Counter[TenantId] = Counter()
        self._max_payload_bytes = max_payload_bytes
        self._operations: dict[RequestId, Operation] = {}
        self._ordered: dict[WorkerId, int] = {}  # the ticket of a trainer's last order
        driver.register(self._execute, OperationCommand.__args__)

    # ---- for the service ----
    async def adopt(self) -> None:
        """Adopt open models and their operations from the durable log."""

        def read(connection: Connection) -> list[tuple[TrainedModel, events.ModelAdopted]]:
            found = []
            for row in connection.execute(sa.select(models).where(models.c.closed.is_(None))):
                model = log.model_of(row)
                records = log.records_after(connection, model.model, row.saved_seq)
                event = events.ModelAdopted(0.0, model.model, row.saved_seq, records, model.tenant)
                found.append((model, event))
            return found

        for model, event in await self._store.call(read):
            self._models[model.model] = model
            job = self._job_of(model.session)
            records = tuple(
                replace(record, operation=replace(record.operation, job=job))
                for record in event.records
            )
            for record in records:
                if record.status == "waiting":
                    self._operations[record.operation.request] = record.operation
                    self._board.expect(record.operation.request, model.tenant)
            self._feed(structs.replace(event, now_s=loop_time(), records=records))

    def model(self, tenant: TenantId, model: ModelId) -> TrainedModel:
        found = self._models.get(model)
        if found is None or found.tenant != tenant:
            raise NotFoundError(f"model_id: {model!r} is not a model of yours, or has ended")
        return found

    def models(self) -> tuple[TrainedModel, ...]:
        return tuple(self._models.values())

    def pending_versions(self) -> set[str]:
        """Weight versions of unfinished publishes: maybe written, but not yet named."""
        return {
            version_of(operation.model, operation.seq)
            for operation in self._operations.values()
            if operation.kind is OpKind.PUBLISH
        }

    def pending_states(self) -> set[str]:
        """URIs that unfinished saves may write to, found by number since names are unknown."""
        found = set()
        for operation in self._operations.values():
            if operation.kind is OpKind.SAVE:
                folders = self._state.checkpoints_of(operation.model)
                written = [path for path in folders if path.name.endswith(f"@{operation.seq}")]
                found |= {self._state.uri(path) for path in written}
        return found

    async def create(self, model: TrainedModel, user_metadata: Any) -> RequestId:
        """Create a model; creating it again returns the same request."""
        operation = self._operation(model, 0, OpKind.CREATE)
        payload = repr((model.base_model, model.lora, model.seed)).encode()
        new = log.Submission(operation, model.tenant, payload, time.time())

        def write(connection: Connection) -> tuple[RequestId, bool]:
            log.add_model(connection, model, user_metadata)
            return log.add_operation(connection, new)

        request, added = await self._store.call(write)
        if added:
            self._models[model.model] = model
            self._accept(operation, payload, model.tenant)
        return request

    async def submit(
        self, model: TrainedModel, seq: int, kind: OpKind, payload: bytes, *, strict: bool = True
    ) -> RequestId:
        """Submit an operation; the same number again returns the same request."""
        operation = self._operation(model, seq, kind)
        new = log.Submission(operation, model.tenant, payload, time.time(), strict)
        self._controller.check_number(model.model, seq)
        self._controller.check_room(model.model)
        self._check_bytes(model.tenant, len(payload))
        request, added = await self._store.call_sized(
            len(payload), lambda c: log.add_operation(c, new)
        )
        if added:
            self._accept(operation, payload, model.tenant)
        return request

    def _check_bytes(self, tenant: TenantId, more: int) -> None:
        """Waiting operations are in memory and on disk, so each tenant has a share."""
        waiting = self._payload_bytes[tenant]
        if waiting and waiting + more > self._max_payload_bytes:
            raise UnavailableError(
                f"operations of yours that wait hold {waiting} bytes, your share is "
                f"{self._max_payload_bytes}; try again"
            )

    async def reject(self, model: TrainedModel, seq: int, kind: OpKind, reason: str) -> None:
        """Use up the number of a refused submission, durably, if the number was valid."""
        operation = self._operation(model, seq, kind)
        new = log.Submission(operation, model.tenant, b"", time.time(), strict=False)
        try:
            self._controller.check_number(model.model, seq)
            added = await self._store.call(lambda c: log.add_rejection(c, new, reason))
        except (ConfigError, RefusedError):
            return  # the number is out of reach, or belongs to another operation
        if added:
            self._feed(events.OpRejected(loop_time(), operation, reason))

    async def close_model(self, model: ModelId, reason: str) -> None:
        """Close a model that gets no more operations."""
        if self._models.pop(model, None) is None:
            return
        self._feed(events.ModelClosed(loop_time(), model, reason))
        closing = models.update().where(models.c.model == model).values(closed=reason)
        await self._store.call(lambda c: c.execute(closing) and None)
        await asyncio.to_thread(remove_folder, self._state.snapshots(model))

    def _operation(self, model: TrainedModel, seq: int, kind: OpKind) -> Operation:
        request = RequestId(f"op-{secrets.token_hex(12)}")
        return Operation(request, model.model, seq, kind, self._job_of(model.session))

    def _accept(self, operation: Operation, payload: bytes, tenant: TenantId) -> None:
        self._payloads[operation.request] = payload
        self._payload_bytes[tenant] += len(payload)
        self._operations[operation.request] = operation
        self._board.expect(operation.request, tenant)
        self._feed(events.OpSubmitted(loop_time(), operation, tenant))

    def job_of(self, request: RequestId) -> JobId | None:
        operation = self._operations.get(request)
        return None if operation is None else operation.job

    def models_by_trainer(self, job: JobId) -> dict[WorkerId, list[str]]:
        """The models of a job by the trainer that has their state."""
        found: dict[WorkerId, list[str]] = {}
        for name, worker in self._controller.holders().items():
            model = self._models.get(name)
            if model is not None and self._job_of(model.session) == job:
                found.setdefault(worker, []).append(name)
        return found

    def prefetch(self, training: Collection[JobId], rolling: Collection[JobId]) -> None:
        """Have agents load the states of jobs that train now, then of jobs that train next."""
        jobs = (*training, *rolling)
        self.moves.prefetch((self.models_by_trainer(job), job in training) for job in jobs)

    # ---- for the hub ----
    def state_sent(self, report: StateSent) -> None:
        """An agent reports how a move of a state ended."""
        if report.error:
            logger.warning("state did not move model=%s: %s", report.model, report.error)
        self._feed(events.StateMoved(loop_time(), ModelId(report.model), report.move, report.error))

    def trainer_joined(self, worker: WorkerId) -> None:
        self._feed(events.TrainerJoined(loop_time(), worker, self._node_of(worker)))

    def trainer_lost(self, worker: WorkerId, reason: str) -> None:
        self._ordered.pop(worker, None)
        self._feed(events.TrainerLost(loop_time(), worker, reason))

    def handle_message(self, worker: WorkerId, message: messages.FromWorker) -> None:
        now_s = loop_time()
        match message:
            case messages.PublishDetached(ticket, elapsed_s):
                self._feed(events.TicketDetached(now_s, worker, ticket, elapsed_s))
            case messages.OpDone(ticket, elapsed_s, result, reached):
                self._results[ticket] = result
                self._feed(events.TicketDone(now_s, worker, ticket, elapsed_s, reached))
                self._results.pop(ticket, None)
            case messages.OpFailed(ticket, error, owner, state_lost):
                failed = (ticket, error, FaultOwner(owner), state_lost)
                self._feed(events.TicketFailed(now_s, worker, *failed))

    # ---- commands ----
    def _execute(self, command: OperationCommand) -> None:
        spawn = self._background.spawn
        match command:
            case commands.RunOp():
                self._ordered[command.worker] = command.ticket
                spawn(self._run(command))
            case commands.RestoreModel(worker, ticket, model, seq, at_most):
                named = (ticket, model, self._snapshot(model, seq), self._source(model))
                self._hub.send(worker, messages.RestoreModel(*named, seq, at_most))
            case commands.DiscardGradients(worker, ticket, model, seq):
                self._hub.send(worker, messages.DiscardGradients(ticket, model, seq))
            case commands.SaveState(worker, ticket, model, seq):
                saved = self._snapshot(model, seq)
                self._hub.send(worker, messages.SaveState(ticket, model, saved))
            case commands.CommitSnapshot(model, seq):
                spawn(self._commit_snapshot(model, seq))
            case commands.DropModel(worker, model):
                self._hub.send(worker, messages.DropModel(model))
            case commands.MoveState() | commands.ForgetStrays():
                spawn(self._tell_agents(command))
            case commands.CompleteOp(request, ticket):
                spawn(self._complete(request, self._results.get(ticket, b"")))
            case commands.FailOp(request, error, owner):
                spawn(self._fail(request, error, owner))

    async def _tell_agents(self, order: commands.MoveState | commands.ForgetStrays) -> None:
        if isinstance(order, commands.ForgetStrays):
            self.moves.delete_strays(order.model)
        elif refused := self.moves.begin(order):
            self.state_sent(StateSent(order.ticket, order.model, refused))

    async def _run(self, command: commands.RunOp) -> None:
        op = command.operation
        payload = self._payloads.get(op.request)
        if payload is None:
            payload = await self._store.call(lambda c: log.payload_of(c, op.request))
        try:
            await self._check_room(op, payload)
            message = self._message(command.ticket, op, payload, command.at_most)
        except SlackwaterError as error:  # no room, model closed, or its base no longer served
            failed = (command.worker, command.ticket, str(error), FaultOwner.USER, False)
            self._feed(events.TicketFailed(loop_time(), *failed))
            return
        # The trainer may be gone by now, and have been replaced under its name.
        if self._ordered.get(command.worker) == command.ticket:
            self._hub.send(command.worker, message)

    async def _check_room(self, op: Operation, payload: bytes) -> None:
        """Refuse a save that its tenant has no room for: only now are earlier saves on disk."""
        save = decode_save(payload) if op.kind is OpKind.SAVE else None
        if op.kind is OpKind.PUBLISH:
            save = decode_publish(payload).save
        model = self._models.get(op.model)
        if save is not None and model is not None:
            limits = self._limits.limits_of(model.tenant)
            await check_room(self._store, self._state.root, limits, model.tenant, save.path)

    def _source(self, model: ModelId) -> str:
        """The base of a model whose state is restored; empty if the model was closed meanwhile."""
        found = self._models.get(model)
        return "" if found is None else self._bases.get(found.base_model).uri

    def _snapshot(self, model: ModelId, seq: int) -> str:
        return self._state.uri(self._state.snapshot(model, seq))

    def _message(
        self, ticket: int, op: Operation, payload: bytes, at_most: int
    ) -> messages.TrainerOp:
        match op.kind:
            case OpKind.CREATE:
                model = self._models.get(op.model)
                if model is None:
                    raise NotFoundError(f"model {op.model} has ended")
                source = self._bases.get(model.base_model).uri
                made = (model.lora, model.seed, op.seq, at_most)
                return messages.CreateModel(ticket, op.model, source, *made)
            case OpKind.FORWARD | OpKind.FORWARD_BACKWARD:
                return messages.RunPass(ticket, op.model, payload, op.seq)
            case OpKind.OPTIM_STEP:
                return messages.StepOptimizer(ticket, op.model, decode_optim(payload), op.seq)
            case OpKind.SAVE:
                folder = self._state.checkpoint(op.model, decode_save(payload).name, op.seq)
                return messages.SaveState(ticket, op.model, self._state.uri(folder))
            case OpKind.LOAD:
                load = decode_load(payload)
                return messages.LoadState(ticket, op.model, load.saved, load.optimizer, op.seq)
            case OpKind.PUBLISH:
                publish = decode_publish(payload)
                named, stock = publish.sampling_session is None, self._stock()
                return messages.PublishWeights(ticket, op.model, publish.version, named, stock)

    async def _complete(self, request: RequestId, result: bytes) -> None:
        operation = self._operations[request]
        payload = self._drop_payload(request)
        model = self._models.get(operation.model)

        def write(connection: Connection) -> tuple[RequestOutcome, bytes]:
            sent = log.payload_of(connection, request) if payload is None else payload
            answer = result
            if model is not None:
                answer = self._finisher(connection, model, operation, sent) or result
            outcome = RequestOutcome(operation.kind, answer)
            log.finish_operation(connection, request, outcome, time.time())
            return outcome, sent

        outcome, sent = await self._store.call_sized(len(result), write)
        if model is not None:
            self._finished(model, operation, sent)
        del self._operations[request]
        self._board.settle(request, outcome)

    def _drop_payload(self, request: RequestId) -> bytes | None:
        payload = self._payloads.pop(request, None)
        tenant = self._board.tenant_of(request)
        if payload is not None and tenant is not None:
            self._payload_bytes[tenant] -= len(payload)
        return payload

    async def _fail(self, request: RequestId, error: str, owner: FaultOwner) -> None:
        operation = self._operations.pop(request)
        self._drop_payload(request)
        logger.info("operation failed request=%s kind=%s error=%s", request, operation.kind, error)
        outcome = RequestOutcome(operation.kind, None, error, owner)
        await self._store.call(lambda c: log.finish_operation(c, request, outcome, time.time()))
        self._board.settle(request, outcome)

    async def _commit_snapshot(self, model: ModelId, seq: int) -> None:
        await self._store.call(lambda c: log.forget_replayed(c, model, seq))
        await asyncio.to_thread(_remove_older, self._state.snapshots(model), seq)


def version_of(model: ModelId, seq: int) -> str:
    """The weight version that the operation `seq` of a model publishes."""
    return f"{model}@{seq}"


def _remove_older(snapshots: Path, seq: int) -> None:
    for folder in snapshots.iterdir():
        if folder.name.isdigit() and int(folder.name) < seq:
            remove_folder(folder)
