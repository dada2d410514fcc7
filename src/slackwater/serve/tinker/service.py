"""Tinker API: configuration, capabilities, telemetry."""

from ipaddress import ip_address
from typing import Any

from fastapi import APIRouter, Request

from slackwater.model.ids import ModelId
from slackwater.runtime.plane import ControlPlane
from slackwater.serve.http.auth import Caller
from slackwater.serve.http.large_bodies import LargeBodyRoute
from slackwater.serve.tinker import bodies


def is_local(request: Request) -> bool:
    """Whether a request comes from this machine."""
    try:
        return request.client is not None and ip_address(request.client.host).is_loopback
    except ValueError:
        return False


def service_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute, prefix="/api/v1", tags=["tinker: service"])

    @router.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.post("/client/config")
    async def client_config(body: bodies.ClientConfigBody, tenant: Caller) -> dict[str, Any]:
        """Feature flags of the SDK; unlisted flags keep their defaults."""
        return {
            "proto_write_fwdbwd": True,
            "fwd_via_fwdbwd": True,
            "proto_compress_fwdbwd": False,
            "sample_use_retrieve_futures": True,
            "sample_join_sampling_session": True,
            "create_model_via_load_weights": False,
            "custom_loss_server_side": False,
        }

    @router.post("/client/dynamic_config")
    async def dynamic_config(body: bodies.ClientConfigBody, tenant: Caller) -> dict[str, Any]:
        return {"refresh_interval_sec": 300, "sample_cancel_enabled": True}

    @router.get("/get_server_capabilities")
    async def capabilities(tenant: Caller) -> dict[str, Any]:
        models = [
            {
                "model_name": base.name,
                "max_context_length": base.max_context_tokens,
                "trainable": True,
                "sampleable": True,
            }
            for base in plane.bases
        ]
        return {"supported_models": models}

    @router.post("/get_info")
    async def get_info(body: bodies.ModelBody, tenant: Caller, request: Request) -> dict[str, Any]:
        """The tokenizer is a directory for local callers, else a name (see `tokenizers.py`)."""
        model = plane.training.model(tenant, ModelId(body.model_id))
        base = plane.bases.get(model.base_model)
        return {
            "type": "get_info",
            "model_id": model.model,
            "model_data": {
                "arch": base.architecture,
                "model_name": model.base_model,
                "tokenizer_id": str(base.directory) if is_local(request) else base.name,
            },
            "is_lora": model.lora.rank > 0,
            "lora_rank": model.lora.rank,
            "model_name": model.base_model,
            "optimizer_config": {"type": "adamw"},
        }

    @router.post("/telemetry")
    async def telemetry(request: Request, tenant: Caller) -> dict[str, str]:
        """Accept the SDK's telemetry and discard it."""
        return {"status": "accepted"}

    return router
