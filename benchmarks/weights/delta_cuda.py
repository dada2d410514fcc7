"""The delta codec on an NVIDIA GPU: bit-identical frames to the CPU's.

Encoding reads both versions once: the checksum, and changes into a few slots per 4 KB. The slots
are compacted to places and values, which alone travel to the host to be coded; a tile with more
changes than slots is read again. Applying copies a frame's places and values to the device and
writes them block by block.
"""

import ctypes
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver, nvrtc
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.weights.delta_coding import coded
from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.weights.delta.apply import frame_values
from slackwater.weights.delta.checksum import CHUNK_BYTES, CHUNK_WORDS, KEYS, mix
from slackwater.weights.delta.encode import value_planes
from slackwater.weights.delta.frame import BLOCK, DeltaFrame, ValueEncoding, delta_error
from slackwater.weights.delta.places import block_places

_SOURCE = "delta_cuda.cu"
_SLOTS = 64  # changes of a tile that its first reading keeps: 3 % of bf16
_WARPS = 8  # of a thread block; each reads one tile at a time
_RESIDENT = 3  # thread blocks of a multiprocessor
_AHEAD = 4  # of the eight rounds of a tile, whose bytes are on their way together
_AT_ONCE = 4  # tiles that a warp settles
_MASK = (1 << 64) - 1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class DeviceCode:
    """The kernels of `delta_cuda.cu`; tensors are passed by address, numbers as 64 bits."""

    def __init__(self, device: torch.device, constants: dict[str, int]) -> None:
        torch.zeros(1, device=device)  # makes the device's context current
        major, minor = torch.cuda.get_device_capability(device)
        options = [f"--gpu-architecture=sm_{major}{minor}", "-std=c++17"]
        options += [f"-D{name}={value}" for name, value in constants.items()]
        self._module = _done(driver.cuModuleLoadData(_compiled(options)))
        self._kernels: dict[str, Any] = {}

    def __call__(
        self, name: str, blocks: int, *arguments: Tensor | int, threads: int = 256
    ) -> None:
        """Run a kernel on the current stream."""
        if name not in self._kernels:
            found = _done(driver.cuModuleGetFunction(self._module, name.encode()))
            self._kernels[name] = found
        values = tuple(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments)
        kinds = tuple(
            ctypes.c_void_p if isinstance(a, Tensor) else ctypes.c_longlong for a in arguments
        )
        stream = torch.cuda.current_stream().cuda_stream
        shape = (blocks, 1, 1, threads, 1, 1)
        _done(driver.cuLaunchKernel(self._kernels[name], *shape, 0, stream, (values, kinds), 0))


@cache
def device_code(device: torch.device, **constants: int) -> DeviceCode:
    """Compiled once a process."""
    return DeviceCode(device, constants)


def _compiled(options: list[str]) -> bytes:
    source = files(__package__).joinpath(_SOURCE).read_bytes()
    program = _done(nvrtc.nvrtcCreateProgram(source, _SOURCE.encode(), 0, [], []))
    result = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if int(result[0]):
        said = b" " * int(_done(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, said)
        raise UnavailableError(f"{_SOURCE} does not compile for this GPU: {said.decode()[:2000]}")
    code = b" " * int(_done(nvrtc.nvrtcGetCUBINSize(program)))
    _done(nvrtc.nvrtcGetCUBIN(program, code))
    return code


def _done(answer: tuple[Any, ...]) -> Any:
    """The result of a call, or its error raised."""
    if int(answer[0]):
        raise UnavailableError(
            f"the GPU's driver delta_error a call of the delta codec: {answer[0]}"
        )
    return answer[1] if len(answer) > 1 else None


def difference(old: Tensor, new: Tensor, base_checksum: int | None = None) -> DeltaFrame:
    """The frame from `old` to `new`: flat CUDA tensors of 1-, 2- or 4-byte elements.

    Without the old part's `base_checksum` the old part is read once more.
    """
    places, starts, ours, theirs, total = changes(old, new)
    item, elements = new.element_size(), new.numel()
    base = checksum(old) if base_checksum is None else base_checksum
    counts = np.diff(starts)
    kinds, sizes, positions = coded(places, starts, counts, elements, item)
    form, planes = value_planes(ours, theirs)
    return DeltaFrame(item, form, elements, base, total, kinds, sizes, positions, planes)


def changes(
    old: Tensor, new: Tensor
) -> tuple[NDArray[np.uint16], NDArray[np.int64], NDArray[Any], NDArray[Any], int]:
    """On the host: changed places, block starts, new and old elements, the new checksum."""
    places, starts, ours, theirs, sums = device_changes(old, new)
    kind = np.dtype(f"u{new.element_size()}")
    total = (int(sums.sum().item()) + mix(new.numel() * new.element_size())) & _MASK
    return (
        places.cpu().numpy().view(np.uint16),
        starts.cpu().numpy(),
        ours.cpu().numpy().view(kind),
        theirs.cpu().numpy().view(kind),
        total,
    )


def device_changes(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The device part of `changes`; results stay on the device."""
    item, elements = _checked(new), new.numel()
    if _checked(old) != item or old.numel() != elements:
        raise ConfigError.of("delta base", tuple(old.shape), f"must be as {tuple(new.shape)}")
    words, blocks = elements * item // 8, -(-elements // BLOCK)
    per_block = BLOCK * item // CHUNK_BYTES
    tiles, integers, device = -(-words // CHUNK_WORDS), _INTEGERS[item], new.device
    code = _code(old, new)
    slots = _rows(tiles * _SLOTS, integers, device)
    counts = torch.zeros(blocks * per_block, dtype=torch.int64, device=device)
    sums = torch.empty(tiles, dtype=torch.int64, device=device)
    code("compare", -(-tiles // _WARPS), new, old, _keys(device), *slots, counts, sums, words)
    by_block = counts.view(blocks, per_block)
    dense = by_block.sum(1) >= _dense_from(elements, item, device)
    sent = torch.where(dense[:, None], _tile_sizes(elements, item, device), by_block)
    starts = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=device)
    torch.cumsum(sent.view(-1), 0, out=starts[1:])
    found = _rows(int(starts[-1].item()), integers, device)
    together = -(-tiles // (_WARPS * _AT_ONCE))
    code("settle", together, new, old, dense, starts, *slots, *found, words)
    places, ours, theirs = found
    return places, starts[::per_block].contiguous(), ours, theirs, sums


def _rows(count: int, integers: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for changes: places, new and old elements."""
    kinds = (torch.int16, integers, integers)
    places, ours, theirs = (torch.empty(count, dtype=kind, device=device) for kind in kinds)
    return places, ours, theirs


def _code(*parts: Tensor, step: bool = False, keep: bool = False) -> DeviceCode:
    return device_code(
        parts[0].device,
        ITEM=parts[0].element_size(),
        ALIGNED=int(all(part.data_ptr() % 16 == 0 for part in parts)),
        SLOTS=_SLOTS, RESIDENT=_RESIDENT, AHEAD=_AHEAD, AT_ONCE=_AT_ONCE,
        STEP=int(step), KEEP=int(keep),
    )  # fmt: skip


@cache
def _dense_from(elements: int, item: int, device: torch.device) -> Tensor:
    """By block: the changes from which on all of it is sent, as on the CPU; at least one."""
    sizes = np.full(-(-elements // BLOCK), BLOCK)
    sizes[-1] = elements - (len(sizes) - 1) * BLOCK
    least = -(-(sizes * item - (sizes + 7) // 8) // item)
    return torch.from_numpy(np.maximum(least, 1)).to(device)


@cache
def _tile_sizes(elements: int, item: int, device: torch.device) -> Tensor:
    """The number of elements of each tile, by block."""
    each, blocks = CHUNK_BYTES // item, -(-elements // BLOCK)
    starts = np.arange(blocks * (BLOCK // each)) * each
    sizes = np.clip(elements - starts, 0, each)
    return torch.from_numpy(sizes.reshape(blocks, -1)).to(device)


def checksum(part: Tensor) -> int:
    """The checksum of a part on the device, as on the CPU."""
    item = _checked(part)
    words = part.numel() * item // 8
    tiles = -(-words // CHUNK_WORDS)
    sums = torch.empty(tiles, dtype=torch.int64, device=part.device)
    _code(part)("sum_up", -(-tiles // _WARPS), part, _keys(part.device), sums, words)
    return (int(sums.sum().item()) + mix(part.numel() * item)) & _MASK


def apply(part: Tensor, frame: DeltaFrame, known_checksum: int | None = None) -> int:
    """Apply a frame to a part on the device in place; its new checksum. Errors change nothing."""
    item = _checked(part)
    if (part.numel(), item) != (frame.elements, frame.item_bytes):
        raise delta_error(f"it is of {frame.elements} elements, the part has {part.numel()}")
    held = checksum(part) if known_checksum is None else known_checksum
    if held != frame.base_checksum:
        raise delta_error("it stands on another version than this part's")
    places, starts = block_places(frame)
    _fill_dense(places, starts, frame.elements)
    on_device = torch.from_numpy(places.view(np.int16)).to(part.device)
    device_starts = torch.from_numpy(starts).to(part.device)
    host_values = frame_values(frame).view(f"i{item}")
    values = torch.from_numpy(host_values).to(part.device)
    write(part, on_device, device_starts, values, frame.form)
    if checksum(part) != frame.checksum:
        write(part, on_device, device_starts, values, ValueEncoding.ELEMENT)
        raise delta_error("its values do not make the version that it names")
    return frame.checksum


def write(
    part: Tensor,
    places: Tensor,
    starts: Tensor,
    values: Tensor,
    form: ValueEncoding,
    *,
    keep: bool = True,
) -> None:
    """Write a frame's values on the device; with `keep`, `values` holds the old ones afterwards.

    Without `keep` (a disposable copy) elements are not read first.
    """
    code = _code(part, step=form == ValueEncoding.STEP, keep=keep)
    code("write_blocks", starts.numel() - 1, part, places, starts, values, threads=1024)


def touch_lines(part: Tensor, lines: Tensor) -> None:
    """Read and write these 64-byte lines of a part: a memory benchmark."""
    threads = 4 * lines.numel()
    _code(part)("touch_lines", -(-threads // 256), part, lines, lines.numel())


def _fill_dense(places: NDArray[np.uint16], starts: NDArray[np.int64], elements: int) -> None:
    """On the device a dense block has its places too."""
    for block in np.flatnonzero(np.diff(starts) >= min(BLOCK, elements)).tolist():
        first, stop = int(starts[block]), int(starts[block + 1])
        places[first:stop] = np.arange(stop - first, dtype=np.uint16)
    last = len(starts) - 2
    if starts[last + 1] - starts[last] == elements - last * BLOCK:
        places[starts[last] :] = np.arange(starts[last + 1] - starts[last], dtype=np.uint16)


def _checked(part: Tensor) -> int:
    item = part.element_size()
    if not part.is_cuda or part.dim() != 1 or item not in _INTEGERS or not part.is_contiguous():
        raise ConfigError.of(
            "delta part", tuple(part.shape), "must be flat, on CUDA, of 1, 2 or 4 bytes"
        )
    if part.numel() * item % 8 or part.data_ptr() % 8:
        fix = "must begin at and be a multiple of 8 bytes on CUDA"
        raise ConfigError.of("delta part", (part.data_ptr() % 8, part.numel()), fix)
    return item


@cache
def _keys(device: torch.device) -> Tensor:
    return torch.from_numpy(KEYS.view(np.int64)).to(device)
