"""Records what a finished save or publish makes, a checkpoint or a sampling session, and its
answer.

Runs on the store's thread, in the transaction that finishes the operation.
"""

import json
import time

from sqlalchemy.engine import Connection

from slackwater.model.ids import SamplingSessionId
from slackwater.model.operation import Operation, OpKind
from slackwater.model.session import SamplingSession, TrainedModel
from slackwater.runtime.store.checkpoints import (
    EXTERNAL,
    SAMPLER,
    STATE,
    Checkpoint,
    parse_path,
    put_checkpoint,
    size_of,
)
from slackwater.runtime.store.op_payloads import (
    PublishPayload,
    SavePayload,
    decode_load,
    decode_publish,
    decode_save,
)
from slackwater.runtime.store.sampling_sessions import add_sampling_session
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.runtime.store.versions import VersionShelf

_SAVED_BY = {SAMPLER: "save_weights_for_sampler", EXTERNAL: "save_weights_external"}


def lineage_of(model: TrainedModel, seq: int) -> str:
    """The origin of weights; a rerun of the same recipe gets the same text."""
    return f"{model.base_model}|model {model.model_seq}|op {seq}"


def sampling_session_of(
    model: TrainedModel, operation: Operation, publish: PublishPayload
) -> SamplingSession:
    """The session that an ephemeral publish opens."""
    assert publish.sampling_session is not None
    return SamplingSession(
        SamplingSessionId(publish.sampling_session),
        model.tenant,
        model.session,
        model.base_model,
        publish.version,
        lineage_of(model, operation.seq),
        model=model.model,
    )


class RequestFinisher:
    """Writes the rows of finished operations."""

    def __init__(self, state: StateDirectory, shelf: VersionShelf) -> None:
        self._state = state
        self._shelf = shelf

    def __call__(
        self, connection: Connection, model: TrainedModel, operation: Operation, payload: bytes
    ) -> bytes:
        """The answer as JSON; empty if the trainer's result is the answer."""
        match operation.kind:
            case OpKind.CREATE:
                return _json(model_id=model.model, type="create_model")
            case OpKind.SAVE:
                save = decode_save(payload)
                folder = self._state.checkpoint(model.model, save.name, operation.seq)
                self._put(connection, model, operation, save, STATE, self._state.uri(folder))
                return _json(path=save.path, type="save_weights")
            case OpKind.LOAD:
                return _json(path=decode_load(payload).path, type="load_weights")
            case OpKind.PUBLISH:
                return self._finish_publish(connection, model, operation, decode_publish(payload))
        return b""

    def _finish_publish(
        self,
        connection: Connection,
        model: TrainedModel,
        operation: Operation,
        publish: PublishPayload,
    ) -> bytes:
        if publish.save is not None:
            kind = parse_path(publish.save.path)[1]
            self._put(connection, model, operation, publish.save, kind, publish.version)
            return _json(path=publish.save.path, type=_SAVED_BY[kind])
        session = sampling_session_of(model, operation, publish)
        add_sampling_session(connection, session, publish.sampling_seq, time.time())
        return _json(sampling_session_id=session.sampling_session, type=_SAVED_BY[SAMPLER])

    def _put(
        self,
        connection: Connection,
        model: TrainedModel,
        operation: Operation,
        save: SavePayload,
        kind: str,
        held_as: str,
    ) -> None:
        is_state = kind == STATE
        files = (self._state.path(held_as),) if is_state else self._shelf.paths(held_as)
        now_s = time.time()
        new = Checkpoint(
            save.path,
            model.tenant,
            model.model,
            kind,
            save.name,
            model.base_model,
            model.lora,
            held_as,
            lineage_of(model, operation.seq),
            sum(map(size_of, files)),
            now_s,
            None if save.ttl_s is None else now_s + save.ttl_s,
            False,
            save.user_metadata,
        )
        put_checkpoint(connection, new)


def _json(**fields: str) -> bytes:
    return json.dumps(fields).encode()
