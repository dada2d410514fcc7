"""Which engines of the last control plane are expected back: unfinished turns wait for them."""

import asyncio
import contextlib
from collections.abc import Collection
from pathlib import Path

from slackwater.model.ids import NodeId, WorkerId
from slackwater.wire.agent import NodeFacts


class ReturningEngines:
    """A file keeps the names of the nodes that are here; a service that is stopped has none."""

    def __init__(self, file: Path, engine_module: str) -> None:
        self._file, self._module = file, engine_module
        self._here: set[NodeId] = set()
        self._nodes: set[NodeId] = set()
        self._engines: set[WorkerId] = set()
        self._all = asyncio.Event()

    def begin(self, alive: Collection[NodeId] | None) -> None:
        """Expect the nodes that were here, or those of them that are known to be `alive`."""
        with contextlib.suppress(OSError):
            self._nodes = {NodeId(line) for line in self._file.read_text().splitlines()}
        if alive is not None:
            self._nodes &= set(alive)
        self._check()

    def add_node(self, facts: NodeFacts) -> None:
        """Expect the engines that run there."""
        orders = (running.order for running in facts.running)
        self._engines |= {WorkerId(each.worker) for each in orders if each.module == self._module}
        self._nodes.discard(NodeId(facts.node))
        self._here.add(NodeId(facts.node))
        self._write()
        self._check()

    def remove_node(self, node: NodeId) -> None:
        self._here.discard(node)
        self._write()

    def settle_engine(self, worker: WorkerId) -> None:
        """It is back and has reported its turns, or it has ended."""
        self._engines.discard(worker)
        self._check()

    async def wait(self, limit_s: float) -> None:
        """Until none is expected any more, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._all.wait()

    def forget(self) -> None:
        """The service stops, and its nodes with it."""
        self._file.unlink(missing_ok=True)

    def _check(self) -> None:
        if not self._nodes and not self._engines:
            self._all.set()

    def _write(self) -> None:
        self._file.write_text("\n".join(sorted(self._here)))
