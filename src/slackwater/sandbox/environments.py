"""A supervisor's environments: open, adopt after a restart, snapshot, close.

Only file workers (`file_workers.py`) touch tenants' files. This module creates, renames and mounts
the supervisor's own folders and handles the workers' outcomes. An empty environment opens at once.
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from slackwater.model.action_input import check_environment_name, check_file_names
from slackwater.model.errors import NotFoundError, RefusedError, SlackwaterError
from slackwater.sandbox import linux
from slackwater.sandbox.backends.port import Backend
from slackwater.sandbox.environment import Environment
from slackwater.sandbox.file_tasks import mount_overlay
from slackwater.sandbox.file_workers import FileTask, FileWorkers, TaskOutcome
from slackwater.sandbox.quarantine import Quarantine
from slackwater.sandbox.reports import (
    EnvironmentCreated,
    EnvironmentCreationFailed,
    Report,
    SnapshotEnded,
)
from slackwater.sandbox.snapshots import Snapshots
from slackwater.sandbox.users import UserPool

logger = logging.getLogger(__name__)

POPULATE_WITHIN_S = 60.0
SNAPSHOT_WITHIN_S = 50.0  # below what the control plane waits for one
ADOPT_WITHIN_S = 20.0
_RECORD = "kept.json"
_MAX_RECORD_BYTES = 65_536

Note = Mapping[str, str | int]


@dataclass(eq=False)
class Environments:
    """`report` gets outcomes; `on_change` is called when one opens or fails."""

    root: Path
    _: KW_ONLY
    backend: Backend
    snapshots: Snapshots
    users: UserPool | None
    workers: FileWorkers
    quarantine: Quarantine
    report: Callable[[Report], None]
    on_change: Callable[[Environment, str], None]
    _all: dict[str, Environment] = field(default_factory=dict, init=False)

    def names(self) -> list[str]:
        """Open environments, and those that are being created."""
        return sorted(self._all)

    def all(self) -> list[Environment]:
        return list(self._all.values())

    def find(self, name: str) -> Environment:
        environment = self._all.get(name)
        if environment is None:
            raise NotFoundError(f"environment: {name!r} is not open here")
        return environment

    # ---- opening ----
    def open(
        self, name: str, snapshot: str | None, files: Mapping[str, bytes], note: Note | None
    ) -> None:
        """Create an environment; raises errors that are known at once and reports later ones."""
        check_environment_name("environment", name)
        check_file_names(files)
        if name in self._all:
            raise RefusedError(f"environment: {name!r} is open already")
        snapshot_folder = None if snapshot is None else self.snapshots.find(snapshot)
        user = None if self.users is None else self.users.allocate()
        environment = Environment(name, f"{self.root}/{name}", user, note=note or {})
        record = None if note is None else {"snapshot": snapshot, "note": dict(note)}
        self._all[name] = environment
        try:
            self._make_folders(environment, has_view=snapshot_folder is None)
            if snapshot_folder is None and not files:
                self._complete(environment, record)
                return
            environment.mounted = snapshot_folder is not None and self.snapshots.method == "overlay"
            environment.populating = self.workers.submit(
                FileTask(
                    "populate",
                    {
                        "root": environment.root,
                        "snapshot": None if snapshot_folder is None else str(snapshot_folder),
                        "overlay": environment.mounted,
                        "user": user,
                        "files": {path: bytes(content) for path, content in files.items()},
                    },
                    POPULATE_WITHIN_S,
                    lambda outcome: self._finish_populating(environment, record, outcome),
                )
            )
        except Exception as error:
            self.remove(environment, f"it could not be opened: {error}")
            raise

    def _make_folders(self, environment: Environment, *, has_view: bool) -> None:
        os.mkdir(environment.root)
        os.chmod(environment.root, 0o711)
        for folder in (environment.tmp, environment.view) if has_view else (environment.tmp,):
            os.mkdir(folder)
            os.chmod(folder, 0o700)
            if environment.user is not None:
                os.chown(folder, environment.user, environment.user)

    def _finish_populating(
        self, environment: Environment, record: Mapping[str, Any] | None, outcome: TaskOutcome
    ) -> None:
        environment.populating = None
        try:
            if outcome.error is not None:
                raise RefusedError(outcome.error)
            self._complete(environment, record)
        except (OSError, SlackwaterError) as error:
            reason = f"environment {environment.name!r} cannot be opened: {error}"
            self.remove(environment, reason)
            self.report(EnvironmentCreationFailed(environment.name, reason))
            self.on_change(environment, reason)

    def _complete(self, environment: Environment, record: Mapping[str, Any] | None) -> None:
        self.backend.open_environment(environment)
        if record is not None:
            Path(environment.root, _RECORD).write_text(json.dumps(record))
        self.report(EnvironmentCreated(environment.name))
        self.on_change(environment, "")

    # ---- keeping ----
    def adopt(self, wait: Callable[[Callable[[], bool], float], None]) -> dict[str, Note]:
        """Adopt environments that an earlier supervisor kept; returns their notes by name.

        `wait` runs file workers until a condition holds, up to a number of seconds.
        """
        for path in self.snapshots.find_partial():
            self.quarantine.add(str(path))
        self.quarantine.resume()
        for root in sorted(each for each in self.root.iterdir() if each.name[0] != "."):
            try:
                with (root / _RECORD).open("rb") as file:
                    record = json.loads(file.read(_MAX_RECORD_BYTES))
                self._adopt(root, record["snapshot"], dict(record["note"]))
            except FileNotFoundError:
                self._discard(root, "")  # it had no note, so it is not kept
            except Exception as error:  # noqa: BLE001  (the start continues, whatever the folder contains)
                self._discard(root, f"it could not be kept: {error}")
        wait(lambda: not any(each.populating for each in self.all()), ADOPT_WITHIN_S)
        for environment in self.all():
            if environment.populating is not None:
                self.remove(environment, "it could not be kept: its files took too long")
        return {name: environment.note for name, environment in self._all.items()}

    def _discard(self, root: Path, reason: str) -> None:
        if reason:
            logger.warning("environment is not kept name=%s why=%s", root.name, reason)
        environment = self._all.get(root.name) or Environment(root.name, str(root), None)
        self.remove(environment, reason)

    def _adopt(self, root: Path, snapshot: str | None, note: Note) -> None:
        environment = Environment(root.name, str(root), None, note=note)
        environment.mounted = (root / "upper").is_dir()
        self._all[root.name] = environment
        has_same_user = True
        if self.users is not None:
            previous_user = os.lstat(environment.changed_folders[0]).st_uid
            has_same_user = self.users.reserve(previous_user)
            environment.user = previous_user if has_same_user else self.users.allocate()
        if environment.mounted:
            if snapshot is None:
                raise NotFoundError("its snapshot has no name")
            snapshot_folder = self.snapshots.find(snapshot)
            mount_overlay(str(snapshot_folder), str(root), environment.user)
        if has_same_user:
            self.backend.open_environment(environment)
            return
        environment.populating = self.workers.submit(
            FileTask(
                "change_owner",
                {"folders": environment.changed_folders, "user": environment.user},
                ADOPT_WITHIN_S,
                lambda outcome: self._finish_adoption(environment, outcome),
            )
        )

    def _finish_adoption(self, environment: Environment, outcome: TaskOutcome) -> None:
        environment.populating = None
        try:
            if outcome.error is not None:
                raise RefusedError(outcome.error)
            self.backend.open_environment(environment)
        except (OSError, SlackwaterError) as error:
            logger.warning("environment is not kept name=%s why=%s", environment.name, error)
            self.remove(environment, f"it could not be kept: {error}")

    # ---- snapshots ----
    def snapshot(self, environment: str, name: str, max_bytes: int | None = None) -> None:
        """Snapshot an environment for others to start from; a report follows."""
        source = self.find(environment)
        partial = self.snapshots.partial(name)
        if source.populating is not None:
            raise RefusedError(f"environment: {environment!r} is not open yet")
        if name in source.copying:
            raise RefusedError(f"snapshot: {name!r} is being taken already")
        source.copying[name] = self.workers.submit(
            FileTask(
                "copy_snapshot",
                {"view": source.view, "partial": str(partial), "max_bytes": max_bytes},
                SNAPSHOT_WITHIN_S,
                lambda outcome: self._finish_snapshot(source, name, partial, outcome),
            )
        )

    def _finish_snapshot(
        self, environment: Environment, name: str, partial: Path, outcome: TaskOutcome
    ) -> None:
        environment.copying.pop(name, None)
        error = outcome.error
        if error is None:
            try:
                self.snapshots.keep(partial, name)
            except (OSError, SlackwaterError) as fault:
                error = str(fault)
        if error is not None:
            error = f"snapshot {name!r} cannot be kept: {error}"
            self.quarantine.add(str(partial))
        self.report(SnapshotEnded(name, error, outcome.value if error is None else 0))

    # ---- closing ----
    def remove(self, environment: Environment, reason: str = "") -> None:
        """Release an environment and delete its files; `reason` is what was wrong with it."""
        if self._all.get(environment.name) is environment:
            del self._all[environment.name]
        if environment.populating is not None:
            self.workers.cancel(environment.populating)
            environment.populating = None
        for task in list(environment.copying.values()):
            self.workers.cancel(task)
            task.done(TaskOutcome(error="its environment was closed"))
        self.release(environment)
        self.quarantine.add(environment.root, reason)
        if environment.user is not None and self.users is not None:
            self.users.release(environment.user)

    def release(self, environment: Environment) -> None:
        """Release an environment's resources; its files stay."""
        try:
            self.backend.close_environment(environment)
        except Exception:
            logger.exception("environment was not released name=%s", environment.name)
        if environment.mounted or os.path.ismount(environment.view):
            with contextlib.suppress(OSError):
                linux.unmount(environment.view)
