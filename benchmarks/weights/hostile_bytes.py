"""Delta frames with bytes changed, cut, doubled or made up, into the decoder."""

import zlib
from dataclasses import dataclass

import numpy as np

from slackwater.weights.delta.apply import apply
from slackwater.weights.delta.encode import Elements, encode
from slackwater.weights.delta.frame import BLOCK, HEAD_BYTES, DeltaError

_HEAD_FIELDS_END = HEAD_BYTES + 9 * 5


@dataclass(slots=True)
class Tally:
    """How it went: refused with the part untouched, harmless, or wrong in one of two ways."""

    tried: int = 0
    refused: int = 0
    harmless: int = 0
    torn: int = 0
    crashes: int = 0


def mutate(seed: int, strings: int, tally: Tally) -> None:
    """Try `strings` mutated frames; most have the frame's own checksum made right again, as a liar
    would.
    """
    rng = np.random.default_rng(seed)
    cases = [_case(rng, kind) for kind in range(6)]
    for _ in range(strings):
        old, new, frame = cases[rng.integers(len(cases))]
        there = old.copy()
        data = _mutated(frame, rng)
        tally.tried += 1
        try:
            apply(there, data)
        except DeltaError:
            tally.refused += 1
            tally.torn += not np.array_equal(there, old)
        except Exception:  # noqa: BLE001  (any other error is what is being looked for)
            tally.crashes += 1
        else:
            tally.harmless += 1
            tally.torn += not np.array_equal(there, new)


def _case(rng: np.random.Generator, kind: int) -> tuple[Elements, Elements, bytes]:
    """A small part of one kind of change; one of them has two blocks."""
    elements = BLOCK + 500 if kind == 5 else int(rng.integers(500, 3000))
    dtype = (np.uint16, np.uint16, np.uint8, np.uint32, np.uint16, np.uint16)[kind]
    top = 1 << (8 * np.dtype(dtype).itemsize)
    old: Elements = rng.integers(0, top, elements, np.uint32).astype(dtype)
    new: Elements = old.copy()
    if kind == 4:
        new[100:400] += 3
    else:
        mask = rng.random(elements) < (0.02, 0.5, 0.1, 1.0, 0.0, 0.003)[kind]
        new[mask] += rng.integers(1, 4, int(mask.sum())).astype(dtype)
    return old, new, encode(old, new)


def _mutated(frame: bytes, rng: np.random.Generator) -> bytes:
    data = bytearray(frame)
    action = int(rng.integers(8))
    if action == 0:
        del data[int(rng.integers(len(data) + 1)) :]
    elif action == 1:
        data = bytearray(rng.bytes(int(rng.integers(1, 600))))
    elif action == 2:
        start = int(rng.integers(len(data)))
        data[start:start] = data[: int(rng.integers(1, 64))]
    else:
        # half of the edits go where lengths and kinds are
        end = len(data) if action % 2 else min(_HEAD_FIELDS_END + 16, len(data))
        for _ in range(int(rng.integers(1, 5))):
            data[int(rng.integers(end))] = int(rng.integers(256))
    if len(data) >= HEAD_BYTES and rng.random() < 0.8:
        crc = zlib.crc32(bytes(data[HEAD_BYTES:]))
        data[HEAD_BYTES - 4 : HEAD_BYTES] = crc.to_bytes(4, "little")
    return bytes(data)
