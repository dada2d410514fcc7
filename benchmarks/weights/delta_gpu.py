"""The delta codec on a GPU: `python -m benchmarks.weights.delta_gpu [GIGABYTES]` prints one JSON
object.

What bandwidth allows is taken from a copy on the same device in the same run: encoding must read
both versions; applying must read and write the 64-byte lines that hold a changed element, since
memory moves no less. How fast memory moves just these lines, each read and written whole once, is
measured too: scattered lines come slower than a copy's. Torch's own way (nonzero, index, scatter)
is measured beside it. Positions are fresh in every round.
"""

# mypy: disable-error-code="no-untyped-call"

import json
import sys
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.weights.delta_cuda import (
    apply,
    changes,
    checksum,
    device_changes,
    difference,
    touch_lines,
    write,
)
from slackwater.weights.delta import apply as host_apply
from slackwater.weights.delta import encode as host_encode
from slackwater.weights.delta.frame import ValueEncoding

_LINE = 64  # bytes that memory moves at least


def timed_ms(action: Callable[[], object], rounds: int = 5) -> float:
    """The best of a few, by the device's clock."""
    best = float("inf")
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        action()
        stop.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(stop))
    return best


def pair(elements: int, share: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two versions in bf16, `share` of their elements different at fresh random places."""
    torch.manual_seed(seed)
    old = torch.empty(elements, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    new = old.view(torch.int16).clone()
    step = 1 << 28
    for start in range(0, elements, step):
        piece = new[start : start + step]
        mask = torch.rand(piece.numel(), device="cuda") < share
        piece ^= mask.to(torch.int16) * 5
    return old.view(torch.int16), new


def check_same(elements: int, share: float, item: int, seed: int) -> bool:
    """Whether the device's frame is the host's, and applying it gives the new version, on both."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(f"u{item}")
    old = rng.integers(0, 1 << (8 * item), elements, np.uint64).astype(kind)
    new = old.copy()
    mask = rng.random(elements) < share
    if share < 0:
        mask[elements // 3 : elements // 2] = True
    new[mask] ^= kind.type(3)
    signed = f"i{item}"
    old_there = torch.from_numpy(old.view(signed)).cuda()
    new_there = torch.from_numpy(new.view(signed)).cuda()
    ours, theirs = difference(old_there, new_there), host_encode.difference(old, new)
    there, here = old_there.clone(), old.copy()
    apply(there, theirs)
    host_apply.apply_frame(here, ours)
    return (
        ours == theirs
        and torch.equal(there, new_there)
        and bool(np.array_equal(here, new))
        and checksum(new_there) == theirs.checksum
    )


def main() -> None:
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 4.0
    elements = int(gigabytes * (1 << 30)) // 2
    figures: dict[str, object] = {"device": torch.cuda.get_device_name(), "gigabytes": gigabytes}
    cases = [
        (elements, share, item)
        for item in (1, 2, 4)
        for elements in (8, 65_536, 200_008, 1_000_000)
        for share in (0.0, 0.001, 0.01, 0.2, 0.7, 1.0, -1.0)
    ]
    figures["bit_identical"] = all(check_same(*case, seed=n) for n, case in enumerate(cases))
    figures["cases"] = len(cases)
    old, new = pair(elements, 0.01, 1)
    size = old.numel() * 2
    spare = torch.empty_like(old)
    spare.copy_(old)
    copy_ms = timed_ms(lambda: spare.copy_(old))
    bandwidth = 2 * size / copy_ms  # bytes a millisecond
    figures["copy_tb_s"] = bandwidth / 1e9
    device_changes(old, new)
    del old, new
    rounds = [_round(elements, seed, spare) for seed in range(2, 5)]
    best = {key: min(each[key] for each in rounds) for key in rounds[0]}
    moved = 2 * _LINE * best["lines"] + best["changed"] * 4  # lines in and out; places and values
    figures |= best | {
        "encode_reads_tb_s": 2 * size / best["encode_ms"] / 1e9,
        "encode_over_bandwidth": 2 * size / bandwidth / best["encode_ms"],
        "apply_over_bandwidth": moved / bandwidth / best["apply_ms"],
        "apply_over_lines": best["lines_ms"] / best["apply_ms"],
        "lines_tb_s": 2 * _LINE * best["lines"] / best["lines_ms"] / 1e9,
        "checksum_over_bandwidth": size / bandwidth / best["checksum_ms"],
    }
    old, new = pair(elements, 0.01, 9)
    figures["encode_and_bring_to_host_ms"] = timed_ms(lambda: changes(old, new), 2)
    sys.stdout.write(json.dumps(figures) + "\n")


def _round(elements: int, seed: int, spare: torch.Tensor) -> dict[str, float]:
    """Everything once, at fresh places."""
    old, new = pair(elements, 0.01, seed)
    places, starts, ours, _, _ = device_changes(old, new)
    index = (old != new).nonzero().squeeze(1)
    spare.copy_(old)
    values = ours.clone()
    write(spare, places, starts, values, ValueEncoding.ELEMENT)
    assert torch.equal(spare, new)
    lines = torch.unique_consecutive(index // (_LINE // 2)).to(torch.int32)
    return {
        "changed": float(index.numel()),
        "lines": float(lines.numel()),
        "lines_ms": timed_ms(lambda: touch_lines(spare, lines), 6),
        "encode_ms": timed_ms(lambda: device_changes(old, new), 3),
        "torch_encode_ms": timed_ms(lambda: _torch_encode(old, new), 2),
        "apply_ms": timed_ms(
            lambda: write(spare, places, starts, values, ValueEncoding.ELEMENT, keep=False), 6
        ),
        "apply_keeping_old_ms": timed_ms(
            lambda: write(spare, places, starts, values, ValueEncoding.ELEMENT), 6
        ),
        "torch_scatter_ms": timed_ms(lambda: spare.index_copy_(0, index, ours), 4),
        "checksum_ms": timed_ms(lambda: checksum(new), 3),
    }


def _torch_encode(old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    index = (old != new).nonzero().squeeze(1)
    return index.to(torch.int32), new[index]


if __name__ == "__main__":
    main()
