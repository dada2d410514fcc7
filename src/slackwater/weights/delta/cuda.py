"""The delta codec on an NVIDIA GPU: the same frames, to the bit, as on the CPU.

Encoding reads both versions once, at the speed of memory: a bit per changed element and the checksum. The bits, a
sixteenth of the bytes or less, are then compacted to places and values, which alone travel to the host, where they are coded. Applying
takes the places and values of a frame to the device and writes them block by block.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slackwater.model.errors import ConfigError
from slackwater.weights.delta.apply import frame_values
from slackwater.weights.delta.checksum import CHUNK_BYTES, GOLDEN, KEYS, MIX_ONE, MIX_TWO, mix
from slackwater.weights.delta.cuda_kernels import (
    compact,
    compare,
    compare_and_stage,
    unstage,
    write_blocks,
)
from slackwater.weights.delta.encode import coded, value_planes
from slackwater.weights.delta.frame import BLOCK, Form, Frame, refused
from slackwater.weights.delta.places import block_places

_TILE_WORDS = 2048  # 64-bit words that one program compares: 16 KB, a whole part of a block
_TILE_BYTES = _TILE_WORDS * 8
_LANES = 2048
_ROOM = 512  # changes of a tile that are staged beside the comparison
_MASK = (1 << 64) - 1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def difference(old: Tensor, new: Tensor, base_checksum: int | None = None) -> Frame:
    """The frame's content that makes `new` out of `old`: flat CUDA tensors of uint8-, int16- or int32-like elements.

    `base_checksum` is the old part's if it is known; without it the old part is read once more.
    """
    places, starts, ours, theirs, total = changes(old, new)
    item, elements = new.element_size(), new.numel()
    base = checksum(old) if base_checksum is None else base_checksum
    counts = np.diff(starts)
    kinds, sizes, positions = coded(places, starts, counts, elements, item)
    form, planes = value_planes(ours, theirs)
    return Frame(item, form, elements, base, total, kinds, sizes, positions, planes)


def changes(
    old: Tensor, new: Tensor
) -> tuple[NDArray[np.uint16], NDArray[np.int64], NDArray[Any], NDArray[Any], int]:
    """The changed places in their blocks, where each block's begin, the new and old elements, the new checksum; on the host."""
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
    """The part of `changes` that runs on the device, where its results stay.

    Both versions are read once. Few changes are staged tile by tile on that way; where a tile has more than fit,
    bits are written first and compacted afterwards.
    """
    item, elements = _checked(new), new.numel()
    if _checked(old) != item or old.numel() != elements:
        raise ConfigError.of("delta base", tuple(old.shape), f"must be as {tuple(new.shape)}")
    tiles = -(-elements * item // _TILE_BYTES)
    per_block, integers = BLOCK * item // _TILE_BYTES, _INTEGERS[item]
    counts = torch.zeros(-(-elements // BLOCK) * per_block, dtype=torch.int32, device=new.device)
    sums = torch.empty(tiles, dtype=torch.int64, device=new.device)
    room = min(_ROOM, _TILE_BYTES // item)
    staged = _empty(tiles * room, integers, new.device)
    words = elements * item // 8
    compare_and_stage[(tiles,)](
        old.view(torch.int64), new.view(torch.int64), old.view(integers), new.view(integers),
        _keys(new.device), _factors(words, new.device), counts, sums, *staged, words,
        PER=8 // item, ROWS=_TILE_BYTES // item // 32, COLUMNS=4 * item, TILES=per_block,
        ROOM=room, num_warps=8,
    )  # fmt: skip
    starts = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=new.device)
    torch.cumsum(counts, 0, out=starts[1:])
    most, count = (int(each) for each in torch.stack((counts.max().long(), starts[-1])).tolist())
    if most > room:
        return _compacted(old, new)
    found = _empty(count, integers, new.device)
    unstage[(tiles,)](counts, starts, *staged, *found, ROOM=room, num_warps=4)
    return found[0], starts[::per_block].contiguous(), found[1], found[2], sums


def _empty(count: int, integers: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Room for places, new elements and old ones."""
    kinds = (torch.int16, integers, integers)
    return tuple(torch.empty(count, dtype=kind, device=device) for kind in kinds)


def _compacted(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`device_changes` for any number of changes, dense blocks included."""
    item, elements = new.element_size(), new.numel()
    masks, counts, sums = _masks(old, new)
    tiles_per_block = BLOCK * item // _TILE_BYTES
    blocks = -(-elements // BLOCK)
    padded = torch.zeros(blocks * tiles_per_block, dtype=torch.int64, device=new.device)
    padded[: counts.numel()] = counts
    in_block = padded.view(blocks, tiles_per_block).sum(1)
    block_sizes = torch.full_like(in_block, BLOCK)
    block_sizes[-1] = elements - (blocks - 1) * BLOCK
    dense = (in_block > 0) & (
        block_sizes * item <= torch.div(block_sizes + 7, 8, rounding_mode="floor") + in_block * item
    )
    tile_elements = _TILE_BYTES // item
    tile_sizes = torch.full_like(padded, tile_elements)
    spare = blocks * BLOCK - elements
    if spare:
        ends = torch.arange(1, padded.numel() + 1, device=new.device) * tile_elements
        tile_sizes = (tile_elements - (ends - elements).clamp(0, tile_elements)).to(torch.int64)
    sent = torch.where(dense.repeat_interleave(tiles_per_block), tile_sizes, padded)
    tile_starts = torch.zeros(padded.numel() + 1, dtype=torch.int64, device=new.device)
    torch.cumsum(sent, 0, out=tile_starts[1:])
    count = int(tile_starts[-1].item())
    integers = _INTEGERS[item]
    places = torch.empty(count, dtype=torch.int16, device=new.device)
    ours, theirs = (torch.empty(count, dtype=integers, device=new.device) for _ in range(2))
    tiles = counts.numel()
    compact[(tiles,)](
        old.view(integers), new.view(integers), masks, dense, tile_starts, places, ours, theirs,
        elements, ROWS=_TILE_BYTES // item // 32, TILES=tiles_per_block, num_warps=4,
    )  # fmt: skip
    return places, tile_starts[::tiles_per_block].contiguous(), ours, theirs, sums


def _masks(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    item = new.element_size()
    words = new.numel() * item // 8
    tiles = -(-words // _TILE_WORDS)
    rows = _TILE_BYTES // item // 32
    device = new.device
    masks = torch.empty(tiles * rows, dtype=torch.int32, device=device)
    counts = torch.empty(tiles, dtype=torch.int32, device=device)
    sums = torch.empty(tiles, dtype=torch.int64, device=device)
    compare[(tiles,)](
        old.view(torch.int64), new.view(torch.int64), _keys(device), _factors(words, device),
        masks, counts, sums, words,
        PER=8 // item, ROWS=rows, COLUMNS=4 * item, COMPARE=True, num_warps=8,
    )  # fmt: skip
    return masks, counts, sums


def checksum(part: Tensor) -> int:
    """The checksum of a part on the device, as on the CPU."""
    item = _checked(part)
    words = part.numel() * item // 8
    tiles = -(-words // _TILE_WORDS)
    sums = torch.empty(tiles, dtype=torch.int64, device=part.device)
    view = part.view(torch.int64)
    compare[(tiles,)](
        view, view, _keys(part.device), _factors(words, part.device), sums, sums, sums, words,
        PER=8 // item, ROWS=_TILE_BYTES // item // 32, COLUMNS=4 * item, COMPARE=False, num_warps=8,
    )  # fmt: skip
    return (int(sums.sum().item()) + mix(part.numel() * item)) & _MASK


def apply(part: Tensor, frame: Frame, known_checksum: int | None = None) -> int:
    """Make a part on the device what the frame says, in place; its new checksum. After an error it is as it was."""
    item = _checked(part)
    if (part.numel(), item) != (frame.elements, frame.item_bytes):
        raise refused(f"it is of {frame.elements} elements, the part has {part.numel()}")
    held = checksum(part) if known_checksum is None else known_checksum
    if held != frame.base_checksum:
        raise refused("it stands on another version than this part's")
    places, starts = block_places(frame)
    _fill_dense(places, starts, frame.elements)
    on_device = torch.from_numpy(places.view(np.int16)).to(part.device)
    device_starts = torch.from_numpy(starts).to(part.device)
    host_values = frame_values(frame).view(f"i{item}")
    values = torch.from_numpy(host_values).to(part.device)
    write(part, on_device, device_starts, values, frame.form)
    if checksum(part) != frame.checksum:
        write(part, on_device, device_starts, values, Form.ELEMENT)
        raise refused("its values do not make the version that it names")
    return frame.checksum


def write(
    part: Tensor,
    places: Tensor,
    starts: Tensor,
    values: Tensor,
    form: Form,
    *,
    keep: bool = True,
) -> None:
    """Write a frame's values, which are on the device; with `keep` the old elements are in `values` afterwards.

    Without it, into a copy that may be thrown away, elements are written without being read first.
    """
    write_blocks[(starts.numel() - 1,)](
        part.view(_INTEGERS[part.element_size()]), places, starts, values,
        BLOCK=BLOCK, BITS=8 * part.element_size(), STEP=form == Form.STEP, KEEP=keep, LANES=_LANES, num_warps=8,
    )  # fmt: skip


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
    if part.numel() * item % 8:
        raise ConfigError.of("delta part", part.numel(), "must be a multiple of 8 bytes on CUDA")
    return item


@cache
def _keys(device: torch.device) -> Tensor:
    return torch.from_numpy(KEYS.view(np.int64)).to(device)


@cache
def _factors(words: int, device: torch.device) -> Tensor:
    """The odd factor of every chunk."""
    chunks = -(-words * 8 // CHUNK_BYTES)
    value = np.arange(1, chunks + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(MIX_ONE)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(MIX_TWO)
    value = (value ^ (value >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(value.view(np.int64)).to(device)
