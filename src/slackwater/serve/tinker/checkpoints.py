"""Reads checkpoints from the durable store, for the routes that name them."""

import time

from slackwater.model.ids import ModelId, TenantId
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.store.checkpoints import Checkpoint, find_checkpoint, list_checkpoints


async def read_checkpoint(
    plane: ControlPlane, tenant: TenantId, path: str, *, is_owner: bool = False
) -> Checkpoint:
    """A checkpoint that the tenant may read or, with `is_owner`, change."""
    return await plane.store.call(
        lambda c: find_checkpoint(c, tenant, path, time.time(), readable=not is_owner)
    )


async def read_checkpoints(
    plane: ControlPlane, tenant: TenantId, model: ModelId | None = None
) -> list[Checkpoint]:
    """A tenant's checkpoints, or those of one of its models; newest first."""
    return await plane.store.call(lambda c: list_checkpoints(c, tenant, time.time(), model))
