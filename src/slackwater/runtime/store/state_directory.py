"""The folder with all state of a service; one service at a time may use it."""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from slackwater.model.errors import ConfigError, RefusedError
from slackwater.model.folder import fingerprint, is_locked, read_object, try_lock, write_whole
from slackwater.model.ids import ModelId
from slackwater.model.uri import Uri

_TIMELINES_KEPT = 20


class StateDirectory:
    """Paths of a service's state. `lock()` keeps a second service out. A command that only asks
    for the running service does not `make` the folder.
    """

    def __init__(self, root: Path, *, make: bool = True) -> None:
        self.root = root.expanduser().resolve()
        self._lock: int | None = None
        if not make:
            return
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            fix = f"cannot be made: {error.strerror}"
            raise ConfigError.of("--state", str(root), fix) from None

    @property
    def database_url(self) -> str:
        return f"sqlite:///{self.root / 'slackwater.db'}"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def keys_file(self) -> Path:
        return self.root / "keys.json"

    def fleet_secret(self) -> str:
        """The secret from which nodes' keys are derived; made at the first start."""
        path = self.root / "fleet.secret"
        try:
            return path.read_text()
        except FileNotFoundError:
            secret = secrets.token_urlsafe(32)
            write_whole(path, secret)
            return secret

    def write_timeline(self, trace: bytes) -> None:
        """Save the timeline of a run. A full disk must not keep the service from stopping."""
        folder = self.root / "timelines"
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
            (folder / f"run-{int(time.time())}.json").write_bytes(trace)
            for old in sorted(folder.glob("run-*.json"))[:-_TIMELINES_KEPT]:
                old.unlink()

    def write_models(self, directories: Mapping[str, Path]) -> None:
        """Write where nodes that share this disk find the models, and the models' fingerprints."""
        index = {
            name: {"directory": str(directory), "fingerprint": fingerprint(directory)}
            for name, directory in directories.items()
        }
        write_whole(self.root / "models.json", json.dumps(index))

    def uri(self, path: Path) -> str:
        """The URI of a saved state, the same on every node."""
        kind, *rest = path.relative_to(self.root).parts
        return str(Uri.parse(f"slackwater:{kind}/{'/'.join(rest)}"))

    def path(self, uri: str) -> Path:
        parsed = Uri.parse(uri)
        return self.root / parsed.kind / parsed.name

    def snapshot(self, model: ModelId, seq: int) -> Path:
        """A trainer's state as the service saves it for itself."""
        return self.snapshots(model) / str(seq)

    def snapshots(self, model: ModelId) -> Path:
        return self.root / "snapshots" / quote(model, safe=":-_")

    def checkpoint(self, model: ModelId, name: str, seq: int) -> Path:
        """A trainer's state as a client saved it; `seq` keeps an overwritten one apart."""
        return self._checkpoints(model) / f"{quote(name, safe='-_')}@{seq}"

    def checkpoints_of(self, model: ModelId) -> list[Path]:
        """Every folder of a model's saves, listed or not."""
        folder = self._checkpoints(model)
        return sorted(folder.iterdir()) if folder.is_dir() else []

    def _checkpoints(self, model: ModelId) -> Path:
        return self.root / "checkpoints" / quote(model, safe=":-_")

    def lock(self) -> None:
        """Lock the folder for this process; RefusedError says who has it."""
        self._lock = try_lock(self.root / "lock")
        if self._lock is None:
            where = (self.read_server() or {}).get("url", "not ready yet")
            raise RefusedError(
                f"a service is running on {self.root} (pid {self.holder() or '?'}, {where}): "
                f"stop it with `slackwater down --state {self.root}`, or give another --state"
            )
        with contextlib.suppress(OSError):  # a full disk
            os.truncate(self._lock, 0)
            os.write(self._lock, str(os.getpid()).encode())

    def unlock(self) -> None:
        """Unlock the folder; the kernel does it too when the process dies."""
        if self._lock is not None:
            self.server_file.unlink(missing_ok=True)
            os.truncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def is_locked(self) -> bool:
        return is_locked(self.root / "lock")

    def holder(self) -> int | None:
        """The process that has locked the folder, also while its service starts."""
        if not self.is_locked():
            return None
        written = (self.root / "lock").read_text() or (self.read_server() or {}).get("pid")
        return None if written is None else int(written)

    @property
    def server_file(self) -> Path:
        return self.root / "server.json"

    def write_server(self, facts: dict[str, Any]) -> None:
        """What `down` and `status` need: pid, URL, key."""
        write_whole(self.server_file, json.dumps(facts))

    def read_server(self) -> dict[str, Any] | None:
        return read_object(self.server_file)
