"""Checkpoint and weight files made from managed state, out of whatever slices are stored."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from slackwater.model.errors import NotFoundError
from slackwater.model.residency import PartRole, StateKey, StoredPart
from slackwater.policy.state.layout import pieces_of
from slackwater.state.catalogue import Catalogue
from slackwater.state.image import Bytes, HostImage
from slackwater.state.port import About

if TYPE_CHECKING:
    from torch import Tensor


def write_checkpoint(
    path: Path,
    catalogue: Catalogue,
    deployment: str,
    images: Mapping[str, HostImage],
    about: About,
    kinds: Sequence[str] | None,
) -> None:
    """One checked tensor file: `KIND.PARAMETER`, or only the name for a single kind."""
    from slackwater.tensors.checked_file import write_tensors  # tensors, only when needed

    tensors: dict[str, Tensor] = {}
    left_out = set(about.get("empty_kinds", ()))
    for part in catalogue.entries[deployment].on_device.parts:
        key = part.key
        named = kinds is not None and len(kinds) == 1
        name = key.parameter if named else f"{key.kind}.{key.parameter}"
        wanted = key.kind in kinds if kinds is not None else part.role is PartRole.KEPT
        stored = part.role is not PartRole.SCRATCH and key.kind not in left_out
        if wanted and stored and name not in tensors:
            tensors[name] = whole(catalogue, part, images)
    if not tensors:
        raise NotFoundError(f"state of {deployment}: has no kind {' or '.join(kinds or ())}")
    write_tensors(path, tensors, dict(about.get("meta", {})))


def whole(catalogue: Catalogue, part: StoredPart, images: Mapping[str, HostImage]) -> "Tensor":
    """The whole parameter of a part, from all slices that this node stores."""
    import torch

    key = part.key
    elements = int(np.prod(part.shape, dtype=np.int64)) if part.shape else key.stop
    wanted = StateKey(key.job, key.model, key.parameter, key.kind, 0, elements)
    stored = catalogue.stored_of(key.job, key.model)
    pieces = pieces_of(wanted, stored)
    views: list[Bytes] = []
    for piece in pieces:
        owner, offset, held = stored[piece.stored]
        if owner not in images:
            raise NotFoundError(f"state of {owner}: is not in host memory")
        start = offset + piece.from_element * held.element_bytes
        views.append(images[owner].data[start : start + piece.elements * held.element_bytes])
    flat = views[0] if len(views) == 1 else np.concatenate(views)
    made = torch.from_numpy(flat).view(getattr(torch, part.dtype))
    return made.view(part.shape) if part.shape else made
