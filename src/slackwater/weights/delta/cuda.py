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
from slackwater.weights.delta.cuda_kernels import compact, compare, write_blocks
from slackwater.weights.delta.encode import coded, value_planes
from slackwater.weights.delta.frame import BLOCK, Form, Frame, refused
from slackwater.weights.delta.places import block_places

_TILE_WORDS = 2048  # 64-bit words that one program compares: 16 KB, a whole part of a block
_TILE_BYTES = _TILE_WORDS * 8
_LANES = 2048
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
    """The part of `changes` that runs on the device, where its results stay."""
    item, elements = _checked(new), new.numel()
    if _checked(old) != item or old.numel() != elements:
        raise ConfigError.of("delta base", tuple(old.shape), f"must be as {tuple(new.shape)}")
    blocks, per_block = -(-elements // BLOCK), BLOCK * item // _TILE_BYTES
    masks, counts, sums = _masks(old, new, blocks * per_block)
    by_block = counts.view(blocks, per_block)
    dense = by_block.sum(1) >= _dense_from(elements, item, new.device)
    sent = torch.where(dense[:, None], _tile_sizes(elements, item, new.device), by_block)
    starts = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=new.device)
    torch.cumsum(sent.view(-1), 0, out=starts[1:])
    count, integers = int(starts[-1].item()), _INTEGERS[item]
    places = torch.empty(count, dtype=torch.int16, device=new.device)
    ours, theirs = (torch.empty(count, dtype=integers, device=new.device) for _ in range(2))
    compact[(sums.numel(),)](
        old.view(integers), new.view(integers), masks, dense, starts, places, ours, theirs,
        elements, ROWS=_TILE_BYTES // item // 32, TILES=per_block, num_warps=1,
    )  # fmt: skip
    return places, starts[::per_block].contiguous(), ours, theirs, sums


@cache
def _dense_from(elements: int, item: int, device: torch.device) -> Tensor:
    """By block: the changes from which on all of it is sent, as on the CPU; at least one."""
    sizes = np.full(-(-elements // BLOCK), BLOCK)
    sizes[-1] = elements - (len(sizes) - 1) * BLOCK
    least = -(-(sizes * item - (sizes + 7) // 8) // item)
    return torch.from_numpy(np.maximum(least, 1)).to(device)


@cache
def _tile_sizes(elements: int, item: int, device: torch.device) -> Tensor:
    """How many elements each tile has, by block."""
    each, blocks = _TILE_BYTES // item, -(-elements // BLOCK)
    starts = np.arange(blocks * (BLOCK // each)) * each
    sizes = np.clip(elements - starts, 0, each).astype(np.int32)
    return torch.from_numpy(sizes.reshape(blocks, -1)).to(device)


def _masks(old: Tensor, new: Tensor, padded: int) -> tuple[Tensor, Tensor, Tensor]:
    """A bit per changed element, their number by tile (zero up to `padded` tiles), and the tiles' checksums."""
    item = new.element_size()
    words = new.numel() * item // 8
    tiles = -(-words // _TILE_WORDS)
    rows = _TILE_BYTES // item // 32
    device = new.device
    masks = torch.empty(tiles * rows, dtype=torch.int32, device=device)
    counts = torch.zeros(padded, dtype=torch.int32, device=device)
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
