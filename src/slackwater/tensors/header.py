"""The header of a checked tensor file, read without loading a tensor or a tensor library.

The header's metadata carries one JSON object: the writer's `meta` and the CRC-32 of each
tensor's bytes (`crc32`). The header determines the file's size, so a truncated file is detected.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slackwater.model.errors import ConfigError

METADATA_KEY = "slackwater"
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
_MALFORMED = (
    OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError,
    struct.error,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A file's contents: each tensor's dtype, shape and checksum, and the writer's `meta`."""

    dtypes: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    crc32: Mapping[str, int]
    meta: Mapping[str, Any]
    file_bytes: int
    data_bytes: int


def metadata_of(crc32: Mapping[str, int], meta: Mapping[str, Any]) -> dict[str, str]:
    """The safetensors metadata that `read_header` reads back."""
    text = json.dumps({"meta": dict(meta), "crc32": dict(crc32)}, sort_keys=True)
    return {METADATA_KEY: text}


def read_header(path: Path) -> TensorHeader:
    """A file's header; refused if the file is missing, truncated or of another kind."""
    try:
        with path.open("rb") as file:
            length = _LENGTH.unpack(file.read(_LENGTH.size))[0]
            if length > _MAX_HEADER_BYTES:
                raise unusable(path, "it is not a tensor file")
            found = json.loads(file.read(length))
        own = json.loads(found.pop("__metadata__")[METADATA_KEY])
        data_bytes = max((int(entry["data_offsets"][1]) for entry in found.values()), default=0)
        header = TensorHeader(
            dtypes={name: str(entry["dtype"]) for name, entry in found.items()},
            shapes={name: tuple(entry["shape"]) for name, entry in found.items()},
            crc32=own["crc32"],
            meta=own["meta"],
            file_bytes=_LENGTH.size + length + data_bytes,
            data_bytes=data_bytes,
        )
    except _MALFORMED as error:
        if isinstance(error, ConfigError):
            raise
        raise unusable(path, f"{type(error).__name__} {error}") from error
    if header.dtypes.keys() != header.crc32.keys():
        raise unusable(path, "its tensors are not those of its checksums")
    if path.stat().st_size != header.file_bytes:
        raise unusable(path, f"it should have {header.file_bytes} bytes, not {path.stat().st_size}")
    return header


def unusable(path: Path, why: str) -> ConfigError:
    return ConfigError.of("tensor file", str(path), f"cannot be used: {why}; take another copy")
