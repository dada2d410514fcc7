"""Versions through a relay: exact, visible when complete, once per slow link, and whatever
breaks.
"""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from relay_stage import BUCKET, SECRET, CuttingProxy, Stage, same, version
from relay_stage import stage as make_stage

from harness.relay_members import ChoosingReceiver
from slackwater.model.errors import NotFoundError, RefusedError, UnavailableError
from slackwater.model.payload import Payload
from slackwater.weights.relay import protocol
from slackwater.weights.relay.bucket import part_checksums, whole_views
from slackwater.weights.relay.bucket_store import BucketKey, BucketStore
from slackwater.weights.relay.client import RelayClient
from slackwater.weights.relay.manifest import buckets_of, tag_of
from slackwater.weights.relay.publisher import publish
from slackwater.weights.relay.server import RelayServer
from slackwater.wire.proof import prove_as_client

DEADLINE_S = 60.0


@pytest.fixture(name="stage")
def a_stage() -> Iterator[Stage]:
    yield from make_stage()


def test_a_newcomer_takes_the_whole_and_then_only_what_changed(stage: Stage) -> None:
    first = version("v1", 1)
    second = version("v2", 2, base=first)
    receiver = stage.receiver("r")
    stage.publish(first)
    assert same(receiver.pull("v1"), first)
    stage.publish(second)
    assert same(receiver.pull("v2"), second)
    assert receiver.last_way is not None
    assert not receiver.last_way.fetch_start
    assert receiver.last_way.bytes < 0.1 * sum(array.nbytes for array in second.arrays)


def test_a_version_that_nobody_reads_is_changed_where_it_lies_and_one_that_is_read_stays(
    stage: Stage,
) -> None:
    first = version("v1", 1)
    second = version("v2", 2, base=first)
    third = version("v3", 3, base=second)
    receiver = stage.receiver("r")
    stage.publish(first)
    memory = [array.ctypes.data for array in receiver.pull("v1").arrays]
    stage.publish(second)
    kept = receiver.pull("v2")
    assert [array.ctypes.data for array in kept.arrays] == memory
    stage.publish(third)
    assert same(receiver.pull("v3"), third)
    assert same(kept, second)


def test_one_that_is_far_behind_takes_the_chain_while_it_is_smaller(stage: Stage) -> None:
    receiver = stage.receiver("r")
    last = version("v0", 0)
    stage.publish(last)
    receiver.pull("v0")
    for number in range(1, 4):
        last = version(f"v{number}", number, base=last)
        stage.publish(last)
    assert same(receiver.pull("v3"), last)
    assert receiver.last_way is not None
    assert [delta.version for delta in receiver.last_way.deltas] == ["v1", "v2", "v3"]
    stage.publish(version("v4", 9))  # all of it is new
    receiver.pull("v4")
    assert receiver.last_way.fetch_start


def test_a_version_is_seen_when_all_of_it_is_there(stage: Stage) -> None:
    new = version("v1", 1)
    buckets = buckets_of(new.tensors, BUCKET)
    with RelayClient(stage.server.address, SECRET) as client:
        for number, bucket in enumerate(buckets[:-1]):
            views = whole_views(new.arrays, bucket)
            tag = tag_of(part_checksums(new.arrays, bucket))
            client.put(BucketKey(Payload("v1"), number), sum(map(len, views)), tag, views)
        assert client.versions() == []
        with pytest.raises(NotFoundError):
            client.manifest("v1")
        manifest = publish(client, new, None, BUCKET)  # goes on where it stood
        assert [line.version for line in client.versions()] == ["v1"]
        assert manifest.bytes_of("") == stage.store.used_bytes


def test_what_a_dead_sender_left_is_not_mixed_with_another_ones_bytes(stage: Stage) -> None:
    dead, new = version("v1", 1), version("v1", 2)
    with RelayClient(stage.server.address, SECRET) as client:
        bucket = buckets_of(dead.tensors, BUCKET)[0]
        views = whole_views(dead.arrays, bucket)
        tag = tag_of(part_checksums(dead.arrays, bucket))
        client.put(BucketKey(Payload("v1"), 0), sum(map(len, views)), tag, views)
        publish(client, new, None, BUCKET)
    assert same(stage.receiver("r").pull("v1", DEADLINE_S), new)


def test_the_same_name_never_means_other_weights(stage: Stage) -> None:
    stage.publish(version("v1", 1))
    stage.last = None
    stage.publish(version("v1", 1))
    with pytest.raises(RefusedError, match="other weights"):
        stage.publish(version("v1", 2))


def test_who_waits_for_a_version_gets_it_when_it_comes(stage: Stage) -> None:
    receiver, new = stage.receiver("r"), version("v1", 1)
    found = []
    thread = threading.Thread(target=lambda: found.append(receiver.pull("v1", DEADLINE_S)))
    thread.start()
    stage.publish(new)
    thread.join(DEADLINE_S)
    assert same(found[0], new)


def test_a_version_that_never_comes_is_an_error_that_says_so(stage: Stage) -> None:
    with pytest.raises(NotFoundError, match="v9"):
        stage.receiver("r").pull("v9", within_s=0.2)


def test_another_secret_is_refused_on_both_sides(stage: Stage) -> None:
    with pytest.raises(RefusedError, match="secret"):
        RelayClient(stage.server.address, b"guessed")
    with socket.create_connection(stage.server.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n".ljust(64))
        stranger.settimeout(DEADLINE_S)
        received = b""
        while data := stranger.recv(4096):
            received += data
        assert received[32:] == bytes(32)  # the challenge, a refusal, and nothing more


def test_a_broken_connection_goes_on_where_it_broke(stage: Stage) -> None:
    new = version("v1", 1)
    stage.publish(new)
    size = sum(array.nbytes for array in new.arrays)
    proxy = CuttingProxy(stage.server.address, after=40_000, cuts=5)
    stage.stack.callback(proxy.close)
    agent = stage.agent("r", relay=proxy.address)
    assert same(ChoosingReceiver(agent).pull("v1", DEADLINE_S), new)
    assert proxy.cut == 5
    assert agent.received_bytes == {"": size}


def test_one_copy_crosses_the_slow_link_and_neighbours_pass_it_on(stage: Stage) -> None:
    new = version("v1", 1)
    stage.publish(new)
    size = sum(array.nbytes for array in new.arrays)
    agents = [stage.agent(f"r{number}") for number in range(5)]
    receivers = [ChoosingReceiver(agent) for agent in agents]
    found: list[bool] = []
    threads = [
        threading.Thread(target=lambda r=r: found.append(same(r.pull("v1", DEADLINE_S), new)))
        for r in receivers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert found == [True] * 5
    assert sum(agent.received_bytes.get("", 0) for agent in agents) == size
    assert all(sum(agent.received_bytes.values()) == size for agent in agents)


def test_a_late_joiner_takes_it_from_a_neighbour_and_from_the_relay_if_that_has_gone(
    stage: Stage,
) -> None:
    new = version("v1", 1)
    stage.publish(new)
    first, second, third = (stage.agent(name) for name in ("first", "second", "third"))
    ChoosingReceiver(first).pull("v1", DEADLINE_S)
    ChoosingReceiver(second).pull("v1", DEADLINE_S)
    assert set(second.received_bytes) == {"first"}
    first.close()
    second.close()
    assert same(ChoosingReceiver(third).pull("v1", DEADLINE_S), new)
    assert set(third.received_bytes) <= {"", "first", "second"}
    assert third.received_bytes[""] == sum(array.nbytes for array in new.arrays)


def test_a_receiver_that_stops_reading_slows_nobody(stage: Stage) -> None:
    new = version("v1", 1)
    stage.publish(new)
    stuck = socket.create_connection(stage.server.address)
    stage.stack.callback(stuck.close)
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    prove_as_client(stuck, SECRET, protocol.PURPOSE)
    protocol.send(stuck, protocol.GetBucket(BucketKey(Payload("v1"), 0)))
    assert same(stage.receiver("r").pull("v1", DEADLINE_S), new)


def test_a_relay_that_comes_back_empty_is_filled_again_and_receivers_go_on(stage: Stage) -> None:
    first = version("v1", 1)
    stage.publish(first)
    receiver = stage.receiver("r")
    receiver.pull("v1")
    host, port = stage.server.address
    stage.server.close()
    second = version("v2", 2, base=first)
    found = []
    thread = threading.Thread(target=lambda: found.append(receiver.pull("v2", DEADLINE_S)))
    thread.start()
    stage.store = BucketStore(64 << 20)
    stage.server = RelayServer(stage.store, SECRET, host=host, port=port)
    stage.stack.callback(stage.server.close)
    stage.publish(second)
    thread.join(DEADLINE_S)
    assert same(found[0], second)


def test_a_delta_that_is_damaged_at_its_source_is_left_for_the_whole(stage: Stage) -> None:
    first = version("v1", 1)
    second = version("v2", 2, base=first)
    receiver = stage.receiver("r")
    stage.publish(first)
    receiver.pull("v1")
    stage.publish(second)
    slot = stage.store.open(BucketKey(Payload("v2", "v1"), 0))
    damaged = bytearray(slot.views[0])
    damaged[60] ^= 0xFF
    slot.views = (memoryview(damaged),)
    stage.store.close(slot)
    assert same(receiver.pull("v2", DEADLINE_S), second)
    assert receiver.last_way is not None
    assert receiver.last_way.fetch_start
    assert same(receiver.pull("v2"), second)


def test_memory_is_bounded_and_room_is_waited_for() -> None:
    store = BucketStore(max_bytes=1000)
    assert store.begin_write(BucketKey(Payload("a"), 0), 800, 0) is not None
    with pytest.raises(UnavailableError, match="relay memory"):
        store.begin_write(BucketKey(Payload("b"), 0), 300, 0)
    with pytest.raises(RefusedError, match="above 1000"):
        store.begin_write(BucketKey(Payload("b"), 1), 1001, 0)
    threading.Timer(0.1, lambda: store.drop(Payload("a"))).start()
    assert store.begin_write(BucketKey(Payload("b"), 0), 300, 0, wait_s=DEADLINE_S) is not None
    assert store.used_bytes == 300


def test_what_is_being_read_stays_until_it_is_read(stage: Stage) -> None:
    new = version("v1", 1)
    stage.publish(new)
    slot = stage.store.open(BucketKey(Payload("v1"), 0))
    stage.store.drop(Payload("v1"))
    assert stage.store.manifests() == ()
    assert bytes(slot.views[0][:64]) == new.arrays[0].tobytes()[:64]
    assert stage.store.used_bytes == slot.size
    stage.store.close(slot)
    assert stage.store.used_bytes == 0


@pytest.fixture(name="shared_stage")
def a_stage_with_shared_memory() -> Iterator[Stage]:
    yield from make_stage(shared=True)


def test_on_one_node_buckets_are_shared_memory(shared_stage: Stage) -> None:
    stage, new = shared_stage, version("v1", 1)
    stage.publish(new)
    agent = stage.agent("r", node="trainer node")
    slot = stage.store.open(BucketKey(Payload("v1"), 0))
    path = Path(slot.path)
    assert path.stat().st_size == slot.size
    stage.store.close(slot)
    assert same(ChoosingReceiver(agent).pull("v1", DEADLINE_S), new)
    stage.store.drop(Payload("v1"))
    assert slot.path == "" and not path.exists()


def test_a_pull_ends_in_time_with_the_reason_if_nobody_answers(stage: Stage) -> None:
    stage.publish(version("v1", 1))
    receiver = stage.receiver("r")
    receiver.pull("v1")
    stage.publish(version("v2", 2))
    stage.server.close()
    began_s = time.monotonic()
    with pytest.raises(UnavailableError):
        receiver.pull("v2", within_s=0.5)
    assert time.monotonic() - began_s < DEADLINE_S
    assert receiver.held() == ("v1",)


def test_manifests_that_do_not_fit_are_refused(stage: Stage) -> None:
    manifest = stage.publish(version("v1", 1))
    for odd in (
        msgspec.structs.replace(manifest, bucket_bytes=10),
        msgspec.structs.replace(manifest, checksums=()),
        msgspec.structs.replace(manifest, sizes={"": (1,)}),
        msgspec.structs.replace(manifest, version="v2"),
    ):
        with (
            RelayClient(stage.server.address, SECRET) as client,
            pytest.raises((RefusedError, ValueError)),
        ):
            client.seal(odd)


def test_bytes_that_are_no_request_end_that_connection_alone(stage: Stage) -> None:
    stage.publish(version("v1", 1))
    rng = np.random.default_rng(0)
    for _ in range(30):
        with socket.create_connection(stage.server.address) as liar:
            liar.settimeout(DEADLINE_S)
            prove_as_client(liar, SECRET, protocol.PURPOSE)
            body = rng.bytes(int(rng.integers(1, 200)))
            liar.sendall(len(body).to_bytes(4, "little") + body)
            liar.shutdown(socket.SHUT_WR)
            while liar.recv(4096):
                pass
    with RelayClient(stage.server.address, SECRET) as client:
        assert [line.version for line in client.versions()] == ["v1"]


def test_of_two_publishers_of_one_version_the_first_wins_and_the_other_is_told(
    stage: Stage,
) -> None:
    first, second = version("v", 1), version("v", 2)

    class Interrupted(RelayClient):
        """Another publishes the same version, other bytes, after this one's first bucket."""

        begun = False

        def put(self, key: BucketKey, size: int, tag: int, views: Sequence[memoryview]) -> None:
            super().put(key, size, tag, views)
            if not self.begun:
                self.begun = True
                with (
                    RelayClient(stage.server.address, SECRET) as other,
                    pytest.raises(RefusedError, match="'v' is published with other weights"),
                ):
                    publish(other, second, None, BUCKET)

    with Interrupted(stage.server.address, SECRET) as client:
        publish(client, first, None, BUCKET)
    assert same(stage.receiver("r").pull("v"), first)


def test_what_a_publisher_that_is_gone_left_behind_is_another_ones(stage: Stage) -> None:
    new = version("v", 2)
    with RelayClient(stage.server.address, SECRET) as gone:
        gone.put(BucketKey(Payload("v"), 0), 8, 1, [memoryview(bytes(8))])
    deadline_s = time.monotonic() + 60
    while True:  # until the relay has noticed
        try:
            with RelayClient(stage.server.address, SECRET) as client:
                publish(client, new, None, BUCKET)
            break
        except RefusedError:
            assert time.monotonic() < deadline_s
    assert same(stage.receiver("r").pull("v"), new)
