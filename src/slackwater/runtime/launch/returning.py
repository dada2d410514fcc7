"""The engines that outlived the last control plane; unfinished turns wait until they reconnect."""

import asyncio
import contextlib
from collections.abc import Collection
from pathlib import Path

from slackwater.model.ids import NodeId, WorkerId
from slackwater.wire.agent import NodeFacts


class ReturningEngines:
    """Tracks them by node; a file names the connected nodes until the service stops."""

    def __init__(self, file: Path, engine_module: str) -> None:
        self._file, self._module = file, engine_module
        self._here: set[NodeId] = set()
        self._nodes: set[NodeId] = set()
        # Read at once: the first agent that joins overwrites the file.
        with contextlib.suppress(OSError):
            self._nodes = {NodeId(line) for line in file.read_text().splitlines()}
        self._begun = False
        self._engines: set[WorkerId] = set()
        self._all = asyncio.Event()

    def begin(self, alive: Collection[NodeId] | None) -> None:
        """Expect the nodes of the last control plane, or only those that are `alive` if known."""
        if alive is not None:
            self._nodes &= set(alive)
        self._begun = True
        self._check()

    def add_node(self, facts: NodeFacts) -> None:
        """A node has connected: expect the engines that run on it."""
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
        """An engine has reported its turns, or has ended."""
        self._engines.discard(worker)
        self._check()

    async def wait(self, limit_s: float) -> None:
        """Wait until no engine is expected any more, at most `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._all.wait()

    def forget(self) -> None:
        """The service stops, and its nodes with it."""
        self._file.unlink(missing_ok=True)

    def _check(self) -> None:
        if self._begun and not self._nodes and not self._engines:
            self._all.set()

    def _write(self) -> None:
        self._file.write_text("\n".join(sorted(self._here)))
