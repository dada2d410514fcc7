"""A safetensors file with a checksum per tensor, written whole or not at all.

A reader sees the old file or the new one, never a part; a damaged file is refused. CRC-32 is
computed in pieces, by several threads: the checksum of two concatenated strings is the first
checksum, as a polynomial, times x to the power of the second string's bits, plus the second one.
"""

import hashlib
import json
import math
import mmap
import os
import struct
import threading
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slackwater.tensors.header import TensorHeader, metadata_of, read_header, unusable

# The label that transformers and peft require in a file.
FOR_TRANSFORMERS = {"format": "pt"}
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "F32": torch.float32, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip
KINDS = {dtype: name for name, dtype in DTYPES.items()}
_PIECE = 16 << 20
_READERS = 16
_WRITERS = 8  # writers of one file share its lock, so more of them would only wait
_THREAD_STATE = threading.local()

_POLYNOMIAL = 0xEDB88320  # bit 31 is the power 0


def combine_crc32(first: int, second: int, second_bytes: int) -> int:
    """The checksum of two concatenated strings, from their own checksums."""
    return _times(_power(8 * second_bytes), first) ^ second


def _times(one: int, other: int) -> int:
    product, bit = 0, 1 << 31
    while one:
        if one & bit:
            product ^= other
            one ^= bit
        bit >>= 1
        other = (other >> 1) ^ (_POLYNOMIAL if other & 1 else 0)
    return product


@lru_cache(maxsize=64)  # most pieces have the same length
def _power(exponent: int) -> int:
    """x to the power of `exponent`, by squaring."""
    result, base = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            result = _times(base, result)
        base = _times(base, base)
        exponent >>= 1
    return result


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes of one tensor, and their offset in the file's data."""

    name: str
    place: int
    data: Tensor


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    labels: Mapping[str, str] | None = None,
    *,
    durable: bool = True,
    replace_held: bool = True,
) -> None:
    """Write a file with these tensors and the writer's `meta` (JSON values), atomically: the same
    bytes for the same input.

    Without `durable` the file is visible sooner, but a power failure may damage it, which its
    checksums reveal. Without `replace_held` an existing file stays: FileExistsError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        _write(partial, tensors, meta, labels or {})
        if durable:
            flush(partial)
        if replace_held:
            partial.replace(path)
        else:
            os.link(partial, path)  # unlike a rename, it fails if the file exists
    finally:
        partial.unlink(missing_ok=True)
    if durable:
        flush(path.parent)


def read_tensors(path: Path, device: str = "cpu") -> tuple[dict[str, Tensor], TensorHeader]:
    """All tensors with the header; refused if a checksum does not match."""
    header = read_header(path)
    try:
        if torch.device(device).type == "cuda":
            tensors, sums = _load_to_device(path, header, device)
        else:
            tensors = map_tensors(path, header)
            sums = _checksum_pieces(
                tensors, lambda piece: [checksum(part.data) for part in piece], _READERS
            )
    except OSError as error:
        raise unusable(path, str(error)) from error
    for name, found in sums.items():
        if found != header.crc32[name]:
            raise unusable(path, f"the bytes of {name} are not as written")
    return tensors, header


def map_tensors(path: Path, header: TensorHeader) -> dict[str, Tensor]:
    """The file's tensors as private mappings: bytes are read when they are first used.

    Not with `safetensors`, which leaks two objects per tensor read (0.8.0): workers read thousands
    of versions.
    """
    sizes = _sizes(path, header)
    with path.open("rb") as file:
        whole = mmap.mmap(file.fileno(), header.file_bytes, access=mmap.ACCESS_COPY)
    data = torch.frombuffer(whole, dtype=torch.uint8)
    return _views(data[header.file_bytes - header.data_bytes :], sizes, header)


def _sizes(path: Path, header: TensorHeader) -> list[int]:
    """The size of each tensor; refuses a file whose data have another size."""
    sizes, at = [], header.file_bytes - header.data_bytes
    for name, shape in header.shapes.items():
        kind = DTYPES.get(header.dtypes[name])
        if kind is None or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise unusable(path, f"{name} is {header.dtypes[name]} of {list(shape)}")
        if at % kind.itemsize:
            raise unusable(path, f"{name} is not aligned")
        sizes.append(math.prod(shape) * kind.itemsize)
        at += sizes[-1]
    if at != header.file_bytes:
        raise unusable(path, f"its tensors end at byte {at}, not at {header.file_bytes}")
    return sizes


def _views(data: Tensor, sizes: Sequence[int], header: TensorHeader) -> dict[str, Tensor]:
    """Tensors of these sizes, adjacent in `data`."""
    parts = zip(header.shapes.items(), data.split(list(sizes)), strict=True)
    return {
        name: part.view(DTYPES[header.dtypes[name]]).view(shape) for (name, shape), part in parts
    }


def _load_to_device(
    path: Path, header: TensorHeader, device: str
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The tensors in one allocation, in the file's order, and their checksums."""
    sizes = _sizes(path, header)
    data = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    tensors = _views(data, sizes, header)
    torch.cuda.current_stream().synchronize()  # queued work may still use this memory
    begin = header.file_bytes - len(data)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return tensors, _checksum_pieces(
            tensors, lambda piece: _get(descriptor, begin, piece), _READERS
        )
    finally:
        os.close(descriptor)


def _get(descriptor: int, begin: int, piece: Sequence[_Part]) -> list[int]:
    """Read adjacent parts of a file whose data begin at `begin`; the CRC-32 of each."""
    staging = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True)
    whole = staging.numpy().data[: sum(len(part.data) for part in piece)]
    if os.preadv(descriptor, [whole], begin + piece[0].place) < len(whole):
        raise OSError("it is truncated")
    sums, at, stream = [], 0, _stream()
    with torch.cuda.stream(stream):
        for part in piece:
            part.data.copy_(staging[at : at + len(part.data)], non_blocking=True)
            sums.append(zlib.crc32(whole[at : at + len(part.data)]))
            at += len(part.data)
        stream.synchronize()
    return sums


def file_entries(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], int]:
    """The entries of a safetensors header, in the order of their data, and its bytes."""
    entries, stop = {}, 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        start, stop = stop, stop + tensors[name].nbytes
        shape, kind = list(tensors[name].shape), KINDS[tensors[name].dtype]
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, stop]}
    return entries, stop


def _write(
    path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], labels: Mapping[str, str]
) -> None:
    """Write the data and compute checksums in one pass, then write the header."""
    entries, stop = file_entries(tensors)
    order = list(entries)

    def header(sums: Mapping[str, int]) -> bytes:
        own = dict(sorted({**metadata_of(sums, meta), **labels}.items()))
        return json.dumps({"__metadata__": own, **entries}, separators=(",", ":")).encode()

    room = -(-len(header(dict.fromkeys(order, 0xFFFFFFFF))) // 8) * 8
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.current_stream().synchronize()  # the tensors may still be being computed
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        # Writers then do not allocate under the file's lock, and a full disk fails before the first
        # byte.
        os.posix_fallocate(descriptor, 0, 8 + room + stop)
        sums = _checksum_pieces(
            {name: tensors[name] for name in order},
            lambda piece: _put(descriptor, 8 + room, piece),
            _WRITERS,
        )
        _pwrite(descriptor, struct.pack("<Q", room) + header(sums).ljust(room), 0)
    finally:
        os.close(descriptor)


def _put(descriptor: int, start: int, piece: Sequence[_Part]) -> list[int]:
    """Write adjacent parts into a file whose data begin at `start`; the CRC-32 of each."""
    parts = [part.data.numpy().data for part in _on_host(piece)]
    for part, data in zip(piece, parts, strict=True):
        _pwrite(descriptor, data, start + part.place)
    return [zlib.crc32(data) for data in parts]


def _on_host(piece: Sequence[_Part]) -> Sequence[_Part]:
    """Copy parts from a device to a pinned buffer, on the thread's own stream."""
    if not any(part.data.is_cuda for part in piece):
        return piece
    # PyTorch reuses pinned buffers from its pool.
    staging = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True)
    stream, found, at = _stream(), [], 0
    with torch.cuda.stream(stream):
        for part in piece:
            room = staging[at : at + len(part.data)]
            found.append(replace(part, data=room.copy_(part.data, non_blocking=True)))
            at += len(part.data)
        stream.synchronize()
    return found


def _stream() -> Any:
    """The thread's own stream: its copies wait neither for other copies nor for kernels."""
    made = getattr(_THREAD_STATE, "stream", None)
    if made is None:
        new_stream: Any = torch.cuda.Stream
        made = _THREAD_STATE.stream = new_stream()
    return made


def _pwrite(descriptor: int, data: bytes | memoryview, place: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, place)
        view, place = view[written:], place + written


def _checksum_pieces(
    tensors: Mapping[str, Tensor], work: Callable[[Sequence[_Part]], list[int]], most: int
) -> dict[str, int]:
    """Call `work` on pieces of all tensors; the CRC-32 of each tensor, combined from those that
    `work` returns for its parts.

    On a machine with a GPU up to `most` threads work at once: checksums and copies release the GIL.
    """
    pieces = _pieces(tensors)
    lanes = torch.get_num_threads()
    if torch.cuda.is_available():
        lanes = max(lanes, min(most, os.cpu_count() or 1))
    if lanes == 1:
        found = [work(piece) for piece in pieces]
    else:
        with ThreadPoolExecutor(lanes, "checksums") as pool:
            found = list(pool.map(work, pieces))
    sums: dict[str, int] = {}
    for piece, crcs in zip(pieces, found, strict=True):
        for part, crc32 in zip(piece, crcs, strict=True):
            before = sums.get(part.name)
            whole = crc32 if before is None else combine_crc32(before, crc32, len(part.data))
            sums[part.name] = whole
    return dict.fromkeys(tensors, 0) | sums  # a tensor may be empty


def _pieces(tensors: Mapping[str, Tensor]) -> list[list[_Part]]:
    """The tensors' bytes in order, cut into pieces of `_PIECE` bytes."""
    pieces: list[list[_Part]] = []
    place, room = 0, 0
    for name, tensor in tensors.items():
        data = _bytes_of(tensor)
        while len(data):
            if not room:
                pieces.append([])
                room = _PIECE
            taken, data = data[:room], data[room:]
            pieces[-1].append(_Part(name, place, taken))
            place, room = place + len(taken), room - len(taken)
    return pieces


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def checksum(tensor: Tensor) -> int:
    """The CRC-32 of a host tensor's bytes."""
    return zlib.crc32(_bytes_of(tensor).numpy().data)


def content_digest(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of host tensors' names, types, shapes and bytes."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        found.update(json.dumps([name, KINDS[tensor.dtype], list(tensor.shape)]).encode())
        found.update(_bytes_of(tensor).numpy().data)
    return found.hexdigest()


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
