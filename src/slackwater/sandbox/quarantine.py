"""Quarantine: folders move here in one rename and are deleted by file workers.

A folder that cannot be deleted stays, and a file beside it records the reason and the number of
tries; a new supervisor reads only those files.
"""

import contextlib
import json
import logging
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from slackwater.sandbox.file_workers import FileTask, FileWorkers, TaskOutcome

logger = logging.getLogger(__name__)

QUARANTINE_FOLDER = ".quarantine"
MAX_TRIES = 4
RETRY_AFTER_S = 30.0
_REASON = ".reason"
_MAX_REASON_BYTES = 16_384
DELETE_WITHIN_S = 60.0  # doubled with each try, so that a merely large folder is deleted in the end


@dataclass(frozen=True, slots=True)
class QuarantineRecord:
    """Why a folder is still here, and how many deletions failed."""

    reason: str
    tries: int = 0


class Quarantine:
    """`folder` is on the same file system as what moves here, and private."""

    def __init__(self, folder: Path, workers: FileWorkers) -> None:
        self._folder = folder
        self._workers = workers
        self._failures: dict[str, QuarantineRecord] = {}
        self._retry_at_s: dict[str, float] = {}
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)

    @property
    def count(self) -> int:
        """The number of folders that had a problem."""
        return len(self._failures)

    def resume(self) -> None:
        """Continue with the folders that an earlier supervisor left."""
        names = set(os.listdir(self._folder))
        for name in sorted(names):
            if name.endswith(_REASON):
                if name.removesuffix(_REASON) not in names:
                    (self._folder / name).unlink(missing_ok=True)
                continue
            if name + _REASON in names:
                self._failures[name] = self._read(name)
            self._delete(name)

    def add(self, path: str, reason: str = "") -> None:
        """Move a folder here and delete it; `reason` is what was wrong with it, if anything."""
        name = f"{os.path.basename(path).lstrip('.')[:200]}.{secrets.token_hex(6)}"
        try:
            os.rename(path, f"{self._folder}/{name}")
        except FileNotFoundError:
            return
        except OSError as error:
            logger.error("folder cannot be moved away path=%s why=%s", path, error)
            return
        if reason:
            self._record_failure(name, QuarantineRecord(reason))
        self._delete(name)

    def next_try_s(self) -> float | None:
        """When `retry` is next needed, monotonic."""
        return min(self._retry_at_s.values(), default=None)

    def retry(self) -> None:
        now_s = time.monotonic()
        for name in [each for each, at_s in self._retry_at_s.items() if at_s <= now_s]:
            del self._retry_at_s[name]
            self._delete(name)

    def _delete(self, name: str) -> None:
        tries = self._failures[name].tries if name in self._failures else 0
        if tries >= MAX_TRIES:
            reason = self._failures[name].reason
            logger.warning(
                "folder stays in quarantine name=%s tries=%d why=%s", name, tries, reason
            )
            return
        self._workers.submit(
            FileTask(
                "delete",
                {"parent": str(self._folder), "name": name},
                DELETE_WITHIN_S * 2**tries,
                lambda outcome: self._record_deletion(name, outcome),
            )
        )

    def _record_deletion(self, name: str, outcome: TaskOutcome) -> None:
        if outcome.error is None:
            if self._failures.pop(name, None) is not None:
                Path(self._folder, name + _REASON).unlink(missing_ok=True)
            return
        tries = self._failures[name].tries + 1 if name in self._failures else 1
        logger.warning("folder was not deleted name=%s try=%d why=%s", name, tries, outcome.error)
        self._record_failure(name, QuarantineRecord(outcome.error, tries))
        self._retry_at_s[name] = time.monotonic() + RETRY_AFTER_S * tries

    def _record_failure(self, name: str, failure: QuarantineRecord) -> None:
        self._failures[name] = failure
        record = json.dumps({"reason": failure.reason[:1000], "tries": failure.tries})
        with contextlib.suppress(OSError):  # a full disk: the next start tries again
            (self._folder / (name + _REASON)).write_text(record)

    def _read(self, name: str) -> QuarantineRecord:
        try:
            with (self._folder / (name + _REASON)).open("rb") as file:
                record = json.loads(file.read(_MAX_REASON_BYTES))
            return QuarantineRecord(str(record["reason"]), int(record["tries"]))
        except Exception as error:  # noqa: BLE001  (the start continues, whatever the file contains)
            return QuarantineRecord(f"its reason cannot be read: {error}")
