"""A safetensors file with a checksum per tensor, written whole or not at all.

A reader sees the old file or the new one, never a part; a file whose bytes changed since is refused.
"""

import os
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slackwater.tensors.header import TensorHeader, metadata_of, read_header, unusable

# What transformers and peft look for in a file that they load.
FOR_TRANSFORMERS = {"format": "pt"}


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    labels: Mapping[str, str] | None = None,
) -> None:
    """Make `path` a file with these tensors and the writer's `meta` (JSON values).

    Hazard: safetensors writes its labels in any order, so only a file without `labels` has the same bytes every time.
    """
    host = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    crc32 = {name: checksum(tensor) for name, tensor in host.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        save_file(host, partial, metadata={**metadata_of(crc32, meta), **(labels or {})})
        flush(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    flush(path.parent)


def read_tensors(path: Path, device: str = "cpu") -> tuple[dict[str, Tensor], TensorHeader]:
    """All tensors with the header; refused if any byte is not as written."""
    header = read_header(path)
    try:
        tensors = load_file(path, device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise unusable(path, str(error)) from error
    for name, tensor in tensors.items():
        if checksum(tensor) != header.crc32[name]:
            raise unusable(path, f"the bytes of {name} are not as written")
    return {name: tensor.to(device) for name, tensor in tensors.items()}, header


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the bytes of a tensor that is on the host."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data)


def flush(path: Path) -> None:
    """Have the kernel write a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
