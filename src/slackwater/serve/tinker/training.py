"""Tinker API: models and their operations."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO

from fastapi import APIRouter, Request

from slackwater.model.errors import ConfigError, RefusedError, SlackwaterError
from slackwater.model.ids import ModelId, TenantId
from slackwater.model.operation import OpKind
from slackwater.model.session import LoraShape, TrainedModel
from slackwater.runtime.executors.trainers import version_of
from slackwater.runtime.live_driver import loop_time
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.store.checkpoints import (
    EXTERNAL,
    SAMPLER,
    STATE,
    checkpoint_path,
    parse_path,
)
from slackwater.runtime.store.op_payloads import LoadPayload, PublishPayload, SavePayload, encode
from slackwater.serve.http.auth import Caller, read_tenant
from slackwater.serve.http.errors import FailedTurnError, GoneError
from slackwater.serve.http.large_bodies import BODY, LargeBodyRoute
from slackwater.serve.tinker import bodies, json_pass
from slackwater.serve.tinker import proto as tinker_proto
from slackwater.serve.tinker.checkpoints import read_checkpoint, read_checkpoints
from slackwater.serve.tinker.pass_reader import (
    JSON,
    JSON_FORWARD,
    PROTOBUF,
    PassHead,
    batch_of,
    read_pass,
    read_pass_file,
)
from slackwater.serve.tinker.weight_files import RECIPIENTS, check_recipients

_KIND_BY_PATH = {
    "/api/v1/optim_step": OpKind.OPTIM_STEP,
    "/api/v1/save_weights": OpKind.SAVE,
    "/api/v1/load_weights": OpKind.LOAD,
    "/api/v1/save_weights_for_sampler": OpKind.PUBLISH,
    "/api/v1/save_weights_external": OpKind.PUBLISH,
}
_JSON_CONTENT = {json_pass.MEDIA_TYPE: {"schema": {"type": "object"}}}
_PROTO_CONTENT = {tinker_proto.MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}
_JSON_BODY = {"requestBody": {"required": True, "content": _JSON_CONTENT}}
_PROTO_BODY = {"requestBody": {"required": True, "content": _PROTO_CONTENT | _JSON_CONTENT}}


class TrainingHandlers:
    """The endpoints of the routes. Each submits an operation and answers with its request."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane

    def model(self, tenant: TenantId, name: str) -> TrainedModel:
        """A model of the tenant; the access counts as a heartbeat of its session."""
        model = self.plane.training.model(tenant, ModelId(name))
        self.plane.sessions.record_heartbeat(model.session, loop_time())
        return model

    @contextlib.asynccontextmanager
    async def _rejecting(self, model: TrainedModel, seq: int, kind: OpKind) -> AsyncIterator[None]:
        """Use up the operation's number if the block refuses the submission."""
        try:
            yield
        except SlackwaterError as error:
            await self.plane.training.reject(model, seq, kind, str(error))
            raise

    async def reject_invalid(self, request: Request, body: Any, reason: str) -> None:
        """Use up the operation's number that an invalid body names, if it names one."""
        kind = _KIND_BY_PATH.get(request.url.path)
        if kind is None or not isinstance(body, dict):
            return
        name, seq = body.get("model_id"), body.get("seq_id")
        if not isinstance(name, str) or not isinstance(seq, int) or not 0 <= seq < 2**31:
            return
        try:
            model = self.model(await read_tenant(request), name)
        except SlackwaterError:
            return
        await self.plane.training.reject(model, seq, kind, reason)

    async def _submit(
        self, model: TrainedModel, seq: int, kind: OpKind, payload: bytes, *, strict: bool = True
    ) -> dict[str, str]:
        request = await self.plane.training.submit(model, seq, kind, payload, strict=strict)
        return {"request_id": request, "model_id": model.model}

    async def forward_backward(self, request: Request, tenant: Caller) -> dict[str, str]:
        """Protobuf, or JSON as older SDKs send it: the content type says which."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        form = JSON if kind == json_pass.MEDIA_TYPE else PROTOBUF
        return await self._submit_pass(tenant, request, form)

    async def forward(self, request: Request, tenant: Caller) -> dict[str, str]:
        """A pass without gradients, as older SDKs request it."""
        return await self._submit_pass(tenant, request, JSON_FORWARD)

    async def _submit_pass(self, tenant: TenantId, request: Request, form: str) -> dict[str, str]:
        """Submit a forward or forward_backward; a helper reads a large batch."""
        fair, file = self.plane.fair_work, request.scope[BODY].file
        batch: bytes | BinaryIO
        if file is None:
            head, batch = await fair.run(tenant, read_pass, await request.body(), form)
        else:
            head, batch = await fair.run(tenant, self._read_in_helper, file, form)
        model = self.model(tenant, head.model_id)
        kind = OpKind.FORWARD if head.forward_only else OpKind.FORWARD_BACKWARD
        if head.seq_id < 1:
            raise ConfigError.of("seq_id", head.seq_id, "must be at least 1")
        if head.error is not None:
            await self.plane.training.reject(model, head.seq_id, kind, str(head.error))
            raise head.error
        payload = batch if isinstance(batch, bytes) else await asyncio.to_thread(batch.read)
        return await self._submit(model, head.seq_id, kind, payload)

    def _read_in_helper(self, body: Path, form: str) -> tuple[PassHead, BinaryIO]:
        """Read a large batch in a helper; its file is opened but not read here yet."""
        try:
            head = self.plane.helpers.run(read_pass_file, body, form)
            return head, batch_of(body).open("rb")
        finally:
            batch_of(body).unlink(missing_ok=True)

    async def optim_step(self, body: bodies.OptimStepBody, tenant: Caller) -> dict[str, str]:
        payload = encode(body.adam_params.adam())
        model = self.model(tenant, body.model_id)
        return await self._submit(model, body.seq_id, OpKind.OPTIM_STEP, payload)

    async def save_weights(self, body: bodies.SaveBody, tenant: Caller) -> dict[str, str]:
        model = self.model(tenant, body.model_id)
        async with self._rejecting(model, body.seq_id, OpKind.SAVE):
            save = self.save_payload(model, STATE, body.path or f"{body.seq_id:06d}", body)
            if not body.overwrite:
                await self._refuse_taken(tenant, save.path, body.seq_id)
        return await self._submit(model, body.seq_id, OpKind.SAVE, encode(save))

    async def _refuse_taken(self, tenant: TenantId, path: str, seq: int) -> None:
        for checkpoint in await read_checkpoints(self.plane, tenant, parse_path(path)[0]):
            if checkpoint.path == path and not checkpoint.held_as.endswith(f"@{seq}"):
                raise RefusedError(f"path: {path} exists; give another name, or overwrite=true")

    @staticmethod
    def save_payload(
        model: TrainedModel, kind: str, name: str, body: bodies.SaveBody | bodies.SaveForSamplerBody
    ) -> SavePayload:
        path = checkpoint_path(model.model, kind, name)
        return SavePayload(path, name, body.ttl_seconds, body.user_metadata)

    async def save_for_sampler(
        self, body: bodies.SaveForSamplerBody, tenant: Caller
    ) -> dict[str, str]:
        model = self.model(tenant, body.model_id)
        save, session = None, None
        async with self._rejecting(model, body.seq_id, OpKind.PUBLISH):
            if body.path is not None:
                save = self.save_payload(model, SAMPLER, body.path, body)
            elif body.sampling_session_seq_id is None:
                raise ConfigError.of("path", None, "must be given, or sampling_session_seq_id")
            else:
                session = f"ss-{secrets.token_hex(12)}"
        version = version_of(model.model, body.seq_id)
        payload = encode(PublishPayload(version, save, session, body.sampling_session_seq_id))
        # The SDK retries an ephemeral one with another sampling_session_seq_id: not a conflict.
        strict = save is not None
        return await self._submit(model, body.seq_id, OpKind.PUBLISH, payload, strict=strict)

    async def save_external(self, body: bodies.SaveExternalBody, tenant: Caller) -> dict[str, str]:
        """Export weights as safetensors, published like a sampler's under their own name."""
        model = self.model(tenant, body.model_id)
        async with self._rejecting(model, body.seq_id, OpKind.PUBLISH):
            metadata = None
            if body.age_encryption_recipients:
                metadata = {RECIPIENTS: check_recipients(body.age_encryption_recipients)}
            path = checkpoint_path(model.model, EXTERNAL, body.path)
        save = SavePayload(path, body.path, body.ttl_seconds, metadata)
        payload = encode(PublishPayload(version_of(model.model, body.seq_id), save))
        return await self._submit(model, body.seq_id, OpKind.PUBLISH, payload)

    async def load_weights(self, body: bodies.LoadBody, tenant: Caller) -> dict[str, str]:
        if body.model_id is None or body.seq_id is None:
            raise ConfigError.of("model_id", body.model_id, "must be given, with seq_id")
        model = self.model(tenant, body.model_id)
        async with self._rejecting(model, body.seq_id, OpKind.LOAD):
            checkpoint = await read_checkpoint(self.plane, tenant, body.path)
            if checkpoint.kind != STATE:
                raise ConfigError.of("path", body.path, "must be saved with save_state (weights)")
            if (checkpoint.base_model, checkpoint.lora) != (model.base_model, model.lora):
                saved = f"{checkpoint.base_model} rank {checkpoint.lora.rank}"
                raise ConfigError.of("path", body.path, f"has another shape: {saved}")
        payload = encode(LoadPayload(body.path, checkpoint.held_as, body.optimizer))
        return await self._submit(model, body.seq_id, OpKind.LOAD, payload)

    async def create_model(self, body: bodies.CreateModelBody, tenant: Caller) -> dict[str, str]:
        session = self.plane.sessions.get(tenant, body.session_id)
        if (why := self.plane.breakdowns.trainer_failure(tenant)) is not None:
            raise FailedTurnError(why)
        if not self.plane.sessions.is_live(session.session):
            raise GoneError(f"session_id: {session.session!r} has ended")
        if body.optimizer_config.type != "adamw":
            raise ConfigError.of(
                "optimizer_config.type", body.optimizer_config.type, "must be adamw"
            )
        base = self.plane.bases.get(body.base_model)
        lora = body.lora_config or bodies.LoraBody(rank=0)
        shape = LoraShape(lora.rank, lora.train_attn, lora.train_mlp, lora.train_unembed)
        if shape.rank and not (shape.train_attn or shape.train_mlp or shape.train_unembed):
            raise ConfigError.of("lora_config", "no layers", "must train attn, mlp or unembed")
        model = TrainedModel(
            ModelId(f"{session.session}:train:{body.model_seq_id}"),
            session.session,
            tenant,
            body.model_seq_id,
            base.name,
            shape,
            lora.seed or 0,
            time.time(),
        )
        request = await self.plane.training.create(model, body.user_metadata)
        return {"request_id": request, "model_id": model.model}


def training_routes(handlers: TrainingHandlers) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute, prefix="/api/v1", tags=["tinker: training"])
    router.post("/create_model")(handlers.create_model)
    router.post("/forward_backward", openapi_extra=_PROTO_BODY)(handlers.forward_backward)
    router.post("/forward", openapi_extra=_JSON_BODY)(handlers.forward)
    router.post("/optim_step")(handlers.optim_step)
    router.post("/save_weights")(handlers.save_weights)
    router.post("/save_weights_for_sampler")(handlers.save_for_sampler)
    router.post("/save_weights_external")(handlers.save_external)
    router.post("/load_weights")(handlers.load_weights)
    return router
