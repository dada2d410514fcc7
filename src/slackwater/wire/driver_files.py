"""The folder through which a driver's keeper and the control plane communicate.

- `lock`: locked while the keeper or the driver lives.
- `keeper.json`: the running attempt, process ids, and the service's address that they were given.
- `exit.json`: how the last attempt ended that was seen to end.
- `log-START`: the drivers' output in pieces; START is the offset of the piece's first byte.

Standard library only: the keeper must start fast.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slackwater.model.folder import is_locked, read_object, try_lock, write_whole

PIECE_BYTES = 2 << 20
PIECES_KEPT = 4


@dataclass(frozen=True, slots=True)
class DriverKeeperRecord:
    """A running attempt; `driver` is the leader of the driver's process group."""

    attempt: int
    keeper: int
    driver: int
    url: str


@dataclass(frozen=True, slots=True)
class Exit:
    """How an attempt ended: a status, or a signal's number below 0."""

    attempt: int
    status: int


class DriverFiles:
    """The folder of one job (see the module)."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def run(self) -> Path:
        """The driver's own files: a recipe's checkpoints and curves."""
        return self.root / "run"

    def make(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)

    # ---- liveness ----
    def take_lock(self) -> int | None:
        """A descriptor that holds the lock, or None while another process holds it."""
        return try_lock(self.root / "lock")

    def lives(self) -> bool:
        return is_locked(self.root / "lock")

    def write_keeper(self, keeper: DriverKeeperRecord) -> None:
        self._write("keeper.json", asdict(keeper))

    def keeper(self) -> DriverKeeperRecord | None:
        found = read_object(self.root / "keeper.json")
        return None if found is None else DriverKeeperRecord(**found)

    def write_exit(self, ended: Exit) -> None:
        self._write("exit.json", asdict(ended))

    def exit(self, attempt: int) -> Exit | None:
        """How this attempt ended, if it was the last that was seen to end."""
        found = read_object(self.root / "exit.json")
        ended = None if found is None else Exit(**found)
        return None if ended is None or ended.attempt != attempt else ended

    def forget_exit(self) -> None:
        (self.root / "exit.json").unlink(missing_ok=True)

    def _write(self, name: str, value: dict[str, Any]) -> None:
        write_whole(self.root / name, json.dumps(value))

    # ---- drivers' logs ----
    def pieces(self) -> list[tuple[int, Path]]:
        """The pieces of the log that are kept, oldest first, with their offsets."""
        found = []
        for path in self.root.glob("log-*"):
            start = path.name.removeprefix("log-")
            if start.isdigit():
                found.append((int(start), path))
        return sorted(found)

    def read_log(self, place: int, most: int) -> tuple[int, bytes]:
        """Up to `most` bytes of the log from offset `place`, or from the first that is kept; below
        0 the offset counts from the end. Returns the offset after them, and the bytes.
        """
        pieces = self.pieces()
        if not pieces:
            return 0, b""
        end = pieces[-1][0] + _size(pieces[-1][1])
        if place < 0:
            place += end
        place = min(max(place, pieces[0][0]), end)
        said = b""
        for start, path in pieces:
            size = _size(path)
            if place < start or place >= start + size or len(said) >= most:
                continue
            with path.open("rb") as file:
                file.seek(place - start)
                more = file.read(most - len(said))
            said += more
            place += len(more)
        return place, said

    def last_lines(self) -> str:
        """The last three lines of the log as one, of at most 400 characters."""
        _, said = self.read_log(-4096, 4096)
        lines = [line.strip() for line in said.decode(errors="replace").splitlines()]
        return " | ".join([line for line in lines if line][-3:])[-400:]


class LogWriter:
    """Appends to the last piece and starts a new one when it is full; the oldest are deleted."""

    def __init__(self, files: DriverFiles) -> None:
        self._files = files
        pieces = files.pieces()
        self._start, path = pieces[-1] if pieces else (0, self._path(0))
        self._file = self._open(path)
        self._size = _size(path)

    def write(self, said: bytes) -> None:
        self._file.write(said)
        self._file.flush()
        self._size += len(said)
        if self._size >= PIECE_BYTES:
            self._file.close()
            self._start, self._size = self._start + self._size, 0
            self._file = self._open(self._path(self._start))
            for _, path in self._files.pieces()[:-PIECES_KEPT]:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        self._file.close()

    def _path(self, start: int) -> Path:
        return self._files.root / f"log-{start:015d}"

    @staticmethod
    def _open(path: Path) -> Any:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
