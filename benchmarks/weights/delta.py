"""`slackwater bench delta`: sizes, speed and safety of the delta codec.

Sizes over a plain coordinate list (a 32-bit index and the value for every changed element) and over
the whole tensor. Speed on one core over the machine's own memory copy, measured in turns with it.
"""

import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.options import BenchOptions
from benchmarks.weights.hostile_bytes import Tally, mutate
from benchmarks.weights.rl_versions import rl_versions
from slackwater.weights.delta.apply import apply
from slackwater.weights.delta.checksum import checksum
from slackwater.weights.delta.encode import encode

Elements = NDArray[Any]
_SHARES = {"0p1pct": 0.001, "1pct": 0.01, "5pct": 0.05, "20pct": 0.2, "100pct": 1.0}
PARTS = ("sizes", "speed", "run", "hostile")
_CLUSTER = 512  # elements that change together


def run(options: BenchOptions) -> dict[str, object]:
    """Sizes first, then speed, then bytes that lie."""
    figures: dict[str, object] = {}
    if options.wants("sizes"):
        figures |= _sizes(options)
    if options.wants("speed"):
        options.progress("speed", 0.45)
        rng = np.random.default_rng(options.seed)
        old = bf16_weights(1 << (24 if options.quick else 25), rng)  # of memory, not of caches
        new = changed(old, 0.01, "scattered", rng)
        figures |= _speed(old, new, 9 if options.quick else 25)
    if options.wants("run"):
        options.progress("versions of a real run", 0.48)
        figures |= rl_versions(4 if options.quick else 12, options.seed)
    if options.wants("hostile"):
        options.progress("hostile bytes", 0.5)
        figures |= _hostile(options)
    return figures


def _sizes(options: BenchOptions) -> dict[str, object]:
    rng = np.random.default_rng(options.seed)
    elements = 1 << (20 if options.quick else 25)
    figures: dict[str, object] = {"elements": elements}
    old = bf16_weights(elements, rng)
    exact = True
    worst = 0.0
    for number, (label, share) in enumerate(_SHARES.items()):
        options.progress(f"sizes at {share:.1%}", 0.4 * number / len(_SHARES))
        for pattern in ("scattered", "clustered", "steps"):
            new = changed(old, share, pattern, rng)
            data = encode(old, new)
            there = old.copy()
            apply(there, data)
            exact = exact and bool(np.array_equal(there, new))
            count = int((old != new).sum())
            name = label if pattern == "scattered" else f"{pattern}_{label}"
            figures[f"over_coo_{name}"] = len(data) / max(6 * count, 1)
            figures[f"over_whole_{name}"] = len(data) / new.nbytes
            worst = max(worst, len(data) / new.nbytes)
    noise = rng.integers(0, 1 << 16, (2, elements), np.uint16)
    worst = max(worst, len(encode(noise[0], noise[1])) / noise[0].nbytes)
    mixture = np.where(rng.random(elements) < 0.01, noise[0], noise[1])
    listed = 6 * int((noise[1] != mixture).sum())
    figures["over_coo_noise_1pct"] = len(encode(noise[1], mixture)) / listed
    figures |= {"exact": exact, "worst_over_whole": worst}
    return figures


def bf16_weights(elements: int, rng: np.random.Generator) -> Elements:
    """Normal weights, cut to bfloat16, as 16-bit integers."""
    values = rng.standard_normal(elements, np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def changed(old: Elements, share: float, pattern: str, rng: np.random.Generator) -> Elements:
    """A copy with `share` of its elements changed: new weights `scattered` or `clustered`, or
    `steps` of one unit.
    """
    if pattern == "clustered":
        mask = np.repeat(rng.random(-(-len(old) // _CLUSTER)) < share, _CLUSTER)[: len(old)]
    else:
        mask = rng.random(len(old)) < share
    new = old.copy()
    if pattern == "steps":
        new[mask] += rng.integers(0, 2, int(mask.sum())).astype(np.uint16) * 2 - 1
    else:
        fresh = bf16_weights(int(mask.sum()), rng)
        new[mask] = np.where(fresh == old[mask], fresh ^ 1, fresh)
    return new


def _speed(old: Elements, new: Elements, rounds: int) -> dict[str, object]:
    data, known = encode(old, new), checksum(old.view(np.uint8))
    there, copied = old.copy(), np.zeros_like(old)
    apply(there, data, known)
    best = dict.fromkeys(("memcpy", "encode", "apply", "apply_unknown"), float("inf"))

    def timed(what: str, action: Callable[[], object]) -> None:
        began_s = time.perf_counter()
        action()
        best[what] = min(best[what], time.perf_counter() - began_s)

    for _ in range(rounds):
        timed("memcpy", lambda: np.copyto(copied, old))
        timed("encode", lambda: encode(old, new))
        np.copyto(there, old)
        timed("apply", lambda: apply(there, data, known))
        np.copyto(there, old)
        timed("apply_unknown", lambda: apply(there, data))
    size = old.nbytes
    return {
        "memcpy_gb_s": size / best["memcpy"] / 1e9,
        "encode_reads_gb_s": 2 * size / best["encode"] / 1e9,
        "encode_over_memcpy": 2 * best["memcpy"] / best["encode"],
        "apply_1pct_over_memcpy": best["memcpy"] / best["apply"],
        "apply_1pct_base_read_over_memcpy": best["memcpy"] / best["apply_unknown"],
    }


def _hostile(options: BenchOptions) -> dict[str, object]:
    total = 20_000 if options.quick else 1_000_000
    mutate(
        options.seed, 1000, Tally()
    )  # what is compiled and kept once is no memory of the strings
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tally = Tally()
    began_s = time.perf_counter()
    for tenth in range(10):
        mutate(options.seed * 10 + tenth, total // 10, tally)
        options.progress("hostile bytes", 0.5 + 0.05 * (tenth + 1))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "hostile_strings": tally.tried,
        "hostile_refused": tally.refused,
        "hostile_harmless": tally.harmless,
        "hostile_torn": tally.torn,
        "hostile_crashes": tally.crashes,
        "hostile_memory_mb": (after - before) / 1024,
        "hostile_s": time.perf_counter() - began_s,
    }
