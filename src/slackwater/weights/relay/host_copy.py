"""Converts versions between tensors and host memory."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slackwater.tensors.checked_file import DTYPES, KINDS
from slackwater.weights.relay.bucket import Bytes
from slackwater.weights.relay.manifest import TensorEntry
from slackwater.weights.relay.publisher import HostVersion

_NUMPY_TYPES = {
    "U8": "u1", "I8": "i1", "I16": "i2", "F16": "f2", "I32": "i4",
    "F32": "f4", "I64": "i8", "F64": "f8",
}  # fmt: skip


def host_version(
    version: str, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], *, own: bool = False
) -> HostVersion:
    """A host copy of the tensors, sorted by name; with `own`, host tensors are not copied."""
    entries: list[TensorEntry] = []
    arrays: list[Bytes] = []
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        entries.append(TensorEntry(name, KINDS[tensor.dtype], tuple(tensor.shape)))
        host = tensor.cpu() if own else torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        arrays.append(host.contiguous().reshape(-1).view(torch.uint8).numpy())
    return HostVersion(version, tuple(entries), tuple(arrays), dict(meta))


def torch_tensors(version: HostVersion) -> dict[str, Tensor]:
    """The version's tensors over its own memory; read-only."""
    pairs = zip(version.tensors, version.arrays, strict=True)
    return {entry.name: _tensor(array, entry) for entry, array in pairs}


def _tensor(array: Bytes, entry: TensorEntry) -> Tensor:
    """Prefers calls that keep the GIL: reacquiring it while engine steps run takes long."""
    if not len(array):
        return torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    if entry.dtype in _NUMPY_TYPES:
        return torch.from_numpy(array.view(_NUMPY_TYPES[entry.dtype]).reshape(entry.shape))
    return torch.from_numpy(array).view(DTYPES[entry.dtype]).reshape(entry.shape)
