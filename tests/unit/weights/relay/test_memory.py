"""Memory of versions and of buckets."""

import threading
from sys import getrefcount

import numpy as np

from slackwater.model.payload import Payload
from slackwater.weights.relay.bucket import tensor_memory
from slackwater.weights.relay.bucket_store import BucketKey, BucketStore
from slackwater.weights.relay.memory import allocate_anonymous

_HUGE = 2 << 20


def test_tensors_have_their_sizes_and_none_reaches_into_another() -> None:
    sizes = [5, 0, 4096, _HUGE + 1, 64]
    arrays = tensor_memory(sizes)
    for number, array in enumerate(arrays):
        array[:] = number
    assert [len(array) for array in arrays] == sizes
    assert all(bool((array == number).all()) for number, array in enumerate(arrays))
    assert all(array.ctypes.data % 64 == 0 for array in arrays if len(array))


def test_large_memory_begins_a_huge_page() -> None:
    memory = np.frombuffer(allocate_anonymous(_HUGE + 5), np.uint8)
    assert len(memory) == _HUGE + 5
    assert memory.ctypes.data % _HUGE == 0


def test_who_reads_a_part_of_a_tensor_is_counted() -> None:
    arrays = tensor_memory([4096, 4096])
    counts = [getrefcount(arrays[0])]
    part = arrays[0][8:16].data
    counts.append(getrefcount(arrays[0]))
    del part
    counts.append(getrefcount(arrays[0]))
    assert counts == [counts[0], counts[0] + 1, counts[0]]


def test_readers_of_a_bucket_are_each_woken_when_their_bytes_are_there() -> None:
    store = BucketStore(1 << 20)
    slot = store.begin_write(BucketKey(Payload("v"), 0), 1000, 1)
    assert slot is not None
    found: list[int] = []
    beyond = (0, 499, 999)
    threads = [
        threading.Thread(target=lambda at=at: found.append(store.wait(slot, at, 30.0)))
        for at in beyond
    ]
    for thread in threads:
        thread.start()
    for reader, filled in zip(threads, (1, 500, 1000), strict=True):
        store.advance(slot, filled)
        reader.join(30.0)
        assert not reader.is_alive()
    assert found == [1, 500, 1000]
