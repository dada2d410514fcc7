"""Periodic work: silent sessions end, results and checkpoints expire, old weights are dropped."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from slackwater.model.ids import SessionId
from slackwater.model.session import SamplingSession, TrainedModel
from slackwater.runtime.executors.engines import EngineExecutor
from slackwater.runtime.executors.trainers import TrainerExecutor
from slackwater.runtime.net.background import wait_until_set
from slackwater.runtime.services.jobs import Jobs
from slackwater.runtime.services.sampling import SamplingService
from slackwater.runtime.services.sessions import Sessions
from slackwater.runtime.services.workload_traces import WorkloadTraces
from slackwater.runtime.settings import ServiceSettings
from slackwater.runtime.store import operation_log, sampling_sessions
from slackwater.runtime.store.checkpoints import (
    HELD_AS_VERSIONS,
    STATE,
    Checkpoint,
    drop_checkpoint,
    find_expired,
    remove_folder,
    size_of,
)
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.schema import checkpoints, operations, samples
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.runtime.store.versions import VersionShelf

logger = logging.getLogger(__name__)

_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Housekeeping:
    """Runs until stopped. `end_session` gets a session, its final status and the reason."""

    settings: ServiceSettings
    store: Store
    state: StateDirectory
    shelf: VersionShelf
    sessions: Sessions
    sampling: SamplingService
    operations: TrainerExecutor
    rollout: EngineExecutor
    jobs: Jobs
    traces: WorkloadTraces
    end_session: Callable[[SessionId, dict[str, Any], str], Awaitable[None]]
    _stopping: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def stop(self) -> None:
        self._stopping.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            for session in self.sessions.reap_silent(loop.time()):
                reason = f"session {session} ended: no heartbeat came for too long"
                logger.info("session reaped session=%s", session)
                status = {"type": "cancelled", "detail": "no heartbeat"}
                await self.end_session(session, status, reason)
            await self._expire()
            self.jobs.end_idle()
            await self.jobs.save()
            await self.traces.save()
            await wait_until_set(self._stopping, _EVERY_S)

    async def _expire(self) -> None:
        now_s = time.time()
        oldest_s = now_s - self.settings.results_kept_s

        def write(connection: Connection) -> list[Checkpoint]:
            for table in (operations, samples):
                connection.execute(
                    table.update()
                    .where(table.c.finished_s < oldest_s, table.c.result.is_not(None))
                    .values(result=None)
                )
            operation_log.drop_orphans(connection, oldest_s)
            sampling_sessions.drop_orphans(connection, oldest_s)
            gone = find_expired(connection, now_s)
            for checkpoint in gone:
                drop_checkpoint(connection, checkpoint.path)
            return gone

        for checkpoint in await self.store.call(write):
            await self.remove_files(checkpoint)

    async def remove_files(self, checkpoint: Checkpoint) -> None:
        """Delete the files of a deleted checkpoint, unless a copy of it is still listed."""
        if checkpoint.kind in HELD_AS_VERSIONS:
            await self.drop_unused_versions()
            return
        copies = sa.select(checkpoints.c.path).where(checkpoints.c.held_as == checkpoint.held_as)
        if await self.store.call(lambda c: c.execute(copies).first()) is None:
            await asyncio.to_thread(remove_folder, self.state.path(checkpoint.held_as))

    async def drop_unlisted_states(self, model: TrainedModel) -> None:
        """Delete folders of a model's saves that no checkpoint names, since they were overwritten.

        Hazard: the order. The first line misses saves that begin later, the second names those that
        run, and the third names those that have ended.
        """
        folders = await asyncio.to_thread(self.state.checkpoints_of, model.model)
        under_way = self.operations.pending_states()
        listed = sa.select(checkpoints.c.held_as).where(checkpoints.c.kind == STATE)
        named = await self.store.call(lambda c: set(c.execute(listed).scalars()))
        for folder in folders:
            if self.state.uri(folder) not in named | under_way:
                await asyncio.to_thread(remove_folder, folder)

    async def drop_sampling_sessions(self, session: SessionId) -> None:
        gone = [s for s in self.sampling.sessions() if s.session == session]
        await self._drop(gone)

    async def trim_versions(self, model: TrainedModel) -> None:
        """Keep the newest snapshots of a model within its share of the disk."""
        settings = self.settings
        own = [session for session in self.sampling.sessions() if session.model == model.model]
        kept_bytes, gone = 0, []
        for place, session in enumerate(reversed(own)):
            kept_bytes += await asyncio.to_thread(self._version_bytes, session.version)
            if place >= settings.ephemeral_versions_kept and (
                kept_bytes > settings.ephemeral_bytes_per_model
            ):
                gone.append(session)
        if gone:
            await self._drop(gone)

    def _version_bytes(self, version: str) -> int:
        return sum(size_of(path) for path in self.shelf.paths(version) if path.exists())

    async def _drop(self, gone: list[SamplingSession]) -> None:
        names = [session.sampling_session for session in gone]
        await self.store.call(lambda c: sampling_sessions.drop_sampling_sessions(c, names))
        self.sampling.drop_sessions(names)
        await self.drop_unused_versions()

    async def drop_unused_versions(self) -> None:
        """Drop weight versions that neither a sampling session nor a checkpoint names."""
        versions = await asyncio.to_thread(self.shelf.versions)
        saved = sa.select(checkpoints.c.held_as).where(checkpoints.c.kind.in_(HELD_AS_VERSIONS))
        named = await self.store.call(lambda c: set(c.execute(saved).scalars()))
        named |= {session.version for session in self.sampling.sessions()}
        named |= self.operations.pending_versions()
        for version in versions:
            if version not in named:
                self.rollout.retire(version)
