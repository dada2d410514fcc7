"""Model names: base models, trained weights by path, and by the friendly name `base:name`."""

from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter

from slackwater.model.errors import ConfigError, NotFoundError
from slackwater.model.ids import TenantId
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.store.base_models import BaseModel
from slackwater.runtime.store.checkpoints import SAMPLER, Checkpoint
from slackwater.serve.http.auth import Caller
from slackwater.serve.http.large_bodies import LargeBodyRoute
from slackwater.serve.tinker.checkpoints import read_checkpoint, read_checkpoints


class ModelNames:
    """Resolves a request's `model`."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    async def weights(self, tenant: TenantId, model: str) -> tuple[BaseModel, str]:
        """The base model and the weight version of a name."""
        if model.startswith("tinker://"):
            checkpoint = await read_checkpoint(self._plane, tenant, model)
        else:
            try:
                base = self._plane.bases.get(model)
                return base, base.version
            except NotFoundError:
                named = _name_newest(await self._samplers(tenant))
                if model not in named:
                    raise
                checkpoint = named[model]
        if checkpoint.kind != SAMPLER:
            raise ConfigError.of("model", model, "must be sampler weights, or a base model's name")
        return self._plane.bases.get(checkpoint.base_model), checkpoint.held_as

    async def models(self, tenant: Caller) -> dict[str, Any]:
        return {"object": "list", "data": await self._list_cards(tenant)}

    async def model(self, name: str, tenant: Caller) -> dict[str, Any]:
        await self.weights(tenant, name)  # NotFoundError if there is none
        cards = await self._list_cards(tenant)
        return next((each for each in cards if each["id"] == name), model_card(name, 0, None, name))

    async def _list_cards(self, tenant: TenantId) -> list[dict[str, Any]]:
        """The card of every name that a tenant can use."""
        samplers = await self._samplers(tenant)
        names = [*_name_newest(samplers).items(), *((each.path, each) for each in samplers)]
        cards = [
            model_card(base.name, 0, None, base.name, base.max_context_tokens)
            for base in self._plane.bases
        ]
        return cards + [
            model_card(name, each.created_s, each.base_model, each.path) for name, each in names
        ]

    async def _samplers(self, tenant: TenantId) -> list[Checkpoint]:
        found = await read_checkpoints(self._plane, tenant)
        return [item for item in found if item.kind == SAMPLER]


def _name_newest(samplers: Iterable[Checkpoint]) -> dict[str, Checkpoint]:
    """`base:name` for the newest save of that name over that base."""
    named: dict[str, Checkpoint] = {}
    for checkpoint in samplers:
        named.setdefault(f"{checkpoint.base_model}:{checkpoint.name}", checkpoint)
    return named


def model_card(
    name: str, created_s: float, parent: str | None, root: str, context: int | None = None
) -> dict[str, Any]:
    """A model card; `root` and `parent` are vLLM's terms for an adapter's path and its base."""
    return {
        "id": name,
        "object": "model",
        "created": int(created_s),
        "owned_by": "slackwater",
        "root": root,
        "parent": parent,
        "max_model_len": context,
    }


def model_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute, prefix="/v1", tags=["openai"])
    names = ModelNames(plane)
    router.get("/models")(names.models)
    router.get("/models/{name:path}")(names.model)
    return router
