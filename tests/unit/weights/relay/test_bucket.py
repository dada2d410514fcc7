"""Changes of a bucket's parts, applied where they lie."""

import numpy as np

from slackwater.weights.delta.checksum import checksum
from slackwater.weights.relay.bucket import apply_changes, encode_changes
from slackwater.weights.relay.manifest import TensorEntry, buckets_of


def test_changes_are_applied_to_the_parts_that_have_some() -> None:
    entries = [TensorEntry(name, "F32", (1000,)) for name in "abc"]
    (bucket,) = buckets_of(tuple(entries))
    old = [np.arange(1000, dtype=np.float32).view(np.uint8) for _ in entries]
    new = [array.copy() for array in old]
    new[0].view(np.float32)[::10] += 1
    new[2].view(np.float32)[5] = -1
    data = memoryview(encode_changes(old, new, bucket))
    known = [checksum(array) for array in old]
    sums = apply_changes(old, bucket, data, known)
    assert sums == [checksum(array) for array in new]
    assert all(np.array_equal(a, b) for a, b in zip(old, new, strict=True))
