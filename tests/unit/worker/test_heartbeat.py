"""What a worker's heartbeat tells of the process itself."""

import asyncio
from collections.abc import Sequence

from harness.one_key import OneKey
from slackwater.model.ids import WorkerId
from slackwater.runtime.net.hub import WorkerHub
from slackwater.wire import messages
from slackwater.wire.frames import Frame
from slackwater.wire.memory import MEMORY_GAUGE, resident_bytes, trim_heap
from slackwater.worker.connection import Connection


class Heard:
    """The first heartbeat."""

    def __init__(self) -> None:
        self.gauges: asyncio.Future[dict[str, float]] = asyncio.get_running_loop().create_future()

    def worker_joined(self, hello: messages.Hello) -> None:
        """Nothing to keep."""

    def handle_frames(self, worker: WorkerId, frames: Sequence[Frame]) -> None:
        for frame in frames:
            match messages.decode_from_worker(frame.body):
                case messages.Heartbeat(gauges) if not self.gauges.done():
                    self.gauges.set_result(gauges)

    def worker_lost(self, worker: WorkerId, reason: str) -> None:
        """Nothing to keep."""


def test_a_heartbeat_tells_the_resident_memory_beside_the_workers_own_gauges() -> None:
    async def body() -> None:
        heard = Heard()
        hub = WorkerHub(OneKey("s"), heartbeat_every_s=0.05)
        await hub.start(heard)
        hello = messages.Hello("w", "trainer")
        worker = await asyncio.to_thread(
            Connection, hub.address, hello, "s", on_orphaned=lambda: None
        )
        worker.report_gauges(lambda: {"running": 3.0})
        with worker:
            gauges = await asyncio.wait_for(heard.gauges, 60)
        await hub.close()
        assert gauges["running"] == 3.0
        assert 1e6 < gauges[MEMORY_GAUGE] < 1e12

    asyncio.run(body())


def test_trimming_gives_back_what_lay_below_a_block_in_use() -> None:
    trim_heap()
    small = [bytearray(64 << 10) for _ in range(1600)]  # below the size that glibc maps by itself
    held = resident_bytes()
    small[:-1] = []
    trim_heap()
    assert resident_bytes() < held - (50 << 20)
