"""A safetensors file with a checksum per tensor, written whole or not at all.

A reader sees the old file or the new one, never a part; a file whose bytes changed since is refused.
"""

import json
import os
import struct
import threading
import uuid
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from slackwater.tensors.header import TensorHeader, metadata_of, read_header, unusable
from slackwater.tensors.sums import joined

# What transformers and peft look for in a file that they load.
FOR_TRANSFORMERS = {"format": "pt"}
_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PIECE = 16 << 20
_OWN = threading.local()


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    labels: Mapping[str, str] | None = None,
    *,
    durable: bool = True,
) -> None:
    """Make `path` a file with these tensors and the writer's `meta` (JSON values): the same bytes for the same input.

    A file that is not `durable` is left to the kernel to write out: readers have it sooner, and if the machine loses its power
    before, it is refused by its checksums.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        _write(partial, tensors, meta, labels or {})
        if durable:
            flush(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    if durable:
        flush(path.parent)


def read_tensors(path: Path, device: str = "cpu") -> tuple[dict[str, Tensor], TensorHeader]:
    """All tensors with the header; refused if any byte is not as written."""
    header = read_header(path)
    try:
        tensors = load_file(path, device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise unusable(path, str(error)) from error
    for name, found in _summed(tensors, lambda name, start, piece: checksum(piece)).items():
        if found != header.crc32[name]:
            raise unusable(path, f"the bytes of {name} are not as written")
    return {name: tensor.to(device) for name, tensor in tensors.items()}, header


def _write(
    path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], labels: Mapping[str, str]
) -> None:
    """Data first, each tensor in one stream through checksum and file; the header when the sums are known."""
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    entries, starts, stop = {}, dict[str, int](), 0
    for name in order:
        start, stop = stop, stop + tensors[name].nbytes
        starts[name] = start
        shape, kind = list(tensors[name].shape), _KINDS[tensors[name].dtype]
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, stop]}

    def header(sums: Mapping[str, int]) -> bytes:
        own = dict(sorted({**metadata_of(sums, meta), **labels}.items()))
        return json.dumps({"__metadata__": own, **entries}, separators=(",", ":")).encode()

    room = -(-len(header(dict.fromkeys(order, 0xFFFFFFFF))) // 8) * 8
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.current_stream().synchronize()  # what is still to be computed of them
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.ftruncate(descriptor, 8 + room + stop)

        def put(name: str, start: int, piece: Tensor) -> int:
            return _put(descriptor, 8 + room + starts[name] + start, piece)

        sums = _summed(tensors, put)
        _pwrite(descriptor, struct.pack("<Q", room) + header(sums).ljust(room), 0)
    finally:
        os.close(descriptor)


def _put(descriptor: int, place: int, piece: Tensor) -> int:
    """Write bytes at a place of a file; their CRC-32. From a device they come through a pinned buffer, by the thread's own stream."""
    if piece.device.type != "cpu":
        staging = torch.empty(
            _PIECE, dtype=torch.uint8, pin_memory=True
        )  # from a pool that keeps them
        with _stream():
            piece = staging[: len(piece)].copy_(piece)
    data = piece.numpy().data
    _pwrite(descriptor, data, place)
    return zlib.crc32(data)


def _stream() -> Any:
    """A stream for each thread that copies: copies of several go side by side, and wait for nobody's kernels."""
    made = getattr(_OWN, "stream", None)
    if made is None:
        new_stream: Any = torch.cuda.Stream
        made = _OWN.stream = new_stream()
    return torch.cuda.stream(made)


def _pwrite(descriptor: int, data: bytes | memoryview, place: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, place)
        view, place = view[written:], place + written


def _summed(
    tensors: Mapping[str, Tensor], work: Callable[[str, int, Tensor], int]
) -> dict[str, int]:
    """Do `work(name, where it begins, bytes)` on pieces of every tensor; the CRC-32 of each, from those that `work` gives.

    Beside a GPU the pieces go in several threads: summing and copying leave Python's lock alone.
    """
    pieces = [
        (name, number * _PIECE, piece)
        for name, tensor in tensors.items()
        for number, piece in enumerate(torch.split(_bytes_of(tensor), _PIECE))
    ]
    lanes = torch.get_num_threads()
    if torch.cuda.is_available():
        lanes = max(lanes, min(16, os.cpu_count() or 1))
    if lanes == 1:
        found = [work(*piece) for piece in pieces]
    else:
        with ThreadPoolExecutor(lanes, "checksums") as pool:
            found = list(pool.map(lambda piece: work(*piece), pieces))
    sums = dict.fromkeys(tensors, 0)
    for (name, start, piece), crc32 in zip(pieces, found, strict=True):
        sums[name] = joined(sums[name], crc32, len(piece)) if start else crc32
    return sums


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the bytes of a tensor that is on the host."""
    return zlib.crc32(_bytes_of(tensor).numpy().data)


def flush(path: Path) -> None:
    """Have the kernel write a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
