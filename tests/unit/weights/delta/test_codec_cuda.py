"""The codec's device half: changes found elsewhere are coded alike, and the GPU's frames are the
CPU's.
"""

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.weights.delta_coding import coded
from slackwater.weights.delta.encode import difference
from slackwater.weights.delta.frame import BLOCK, IndexEncoding
from slackwater.weights.delta.places import block_places


@pytest.mark.parametrize("share", [0.0, 0.002, 0.3, 1.0])
def test_changes_found_elsewhere_are_coded_as_if_found_here(share: float) -> None:
    rng = np.random.default_rng(1)
    old = rng.integers(0, 1 << 16, 3 * BLOCK - 70, np.uint16)
    new = old.copy()
    new[rng.random(len(old)) < share] ^= np.uint16(9)
    new[BLOCK : BLOCK + 5000] ^= np.uint16(2)
    frame = difference(old, new)
    places, starts = block_places(frame)
    for block, kind in enumerate(np.frombuffer(frame.kinds, np.uint16) & 7):
        if kind == IndexEncoding.DENSE:
            first, stop = int(starts[block]), int(starts[block + 1])
            places[first:stop] = np.arange(stop - first, dtype=np.uint16)
    found = coded(places, starts, np.diff(starts), frame.elements, 2)
    assert found == (frame.kinds, frame.sizes, frame.positions)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("item", [1, 2, 4])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0, -1.0])
def test_the_device_makes_and_takes_the_same_frames_as_the_host(item: Any, share: float) -> None:
    from benchmarks.weights.delta_gpu import check_same

    assert check_same(200_008, share, item, seed=3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_part_that_begins_between_two_vectors_is_coded_all_the_same() -> None:
    from benchmarks.weights import delta_cuda as cuda

    torch.manual_seed(0)
    old = torch.randint(-30_000, 30_000, (300_004,), dtype=torch.int16, device="cuda")[4:]
    new = old.clone()
    new[::90] += 1
    frame = cuda.difference(old, new)
    cuda.apply(old, frame)
    assert torch.equal(old, new)
