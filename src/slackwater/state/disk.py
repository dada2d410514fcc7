"""The disk tier: one checksummed file per image, by direct I/O if possible, written atomically.

A file is a page with the sizes, pages with the checksums (both JSON), then the image's pages.
Checksums are per piece, so that reading, checking and copying to the device overlap.
"""

import errno
import json
import mmap
import os
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from slackwater.model.errors import ConfigError, NotFoundError, RefusedError
from slackwater.policy.state.layout import align_up
from slackwater.state.image import PAGE, Bytes

PIECE = 16 << 20
LANES = 4  # threads: they keep the disk busy while checksums are computed
_LONGEST_HEADER = 64 << 20
_LARGEST_SUM = (1 << 64) - 1
_KIND = "slackwater state image 2"


@dataclass(slots=True)
class DiskTier:
    """Images under one folder; `direct` tells whether the last file used direct I/O.

    A dropped file disappears by name at once. Freeing its blocks takes the filesystem a fifth of a
    second per GB, in a thread; only the next write waits for it.
    """

    folder: Path
    direct: bool = field(default=True, init=False)
    _unlinking: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "state-disk-drops"), init=False
    )

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob("*.partial"):  # left by a manager that was killed
            path.unlink(missing_ok=True)

    def path(self, name: str) -> Path:
        return self.folder / f"{quote(name, safe='')}.state"

    def write(self, name: str, pages: Bytes, about: dict[str, Any]) -> None:
        """Write the image's file. If the disk is full, raises and keeps the previous file."""
        self.settle()  # dropped files must free their blocks first
        path, partial = self.path(name), self._unique_partial(name)
        try:
            self._write(partial, pages, about)
            partial.replace(path)
            _sync(self.folder)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise RefusedError(
                    f"disk tier: no room for the {len(pages)} bytes of {name} under "
                    f"{self.folder}: {error.strerror}; "
                    "the state stays in host memory"
                ) from error
            raise
        finally:
            partial.unlink(missing_ok=True)

    def read(
        self,
        name: str,
        pages: Bytes,
        on_begin: Callable[[dict[str, Any]], None] | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        """Fill the pages from the image's file and return its `about`; refuse damaged bytes.

        `on_begin` gets `about` before the first byte, `on_progress` the number of verified bytes.
        """
        path = self.path(name)
        try:
            descriptor, self.direct = _open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise NotFoundError(f"disk tier: holds no state of {name}") from None
        try:
            head = _header(descriptor, path)
            if head["bytes"] != len(pages):
                raise _unusable(path, f"it has {head['bytes']} bytes, not {len(pages)}")
            pieces = _pieces(pages)
            if len(head["sums"]) != len(pieces):
                raise _unusable(path, f"it has {len(head['sums'])} sums, not {len(pieces)}")
            start, about = int(head["begins"]), dict[str, Any](head["about"])
            if on_begin is not None:
                on_begin(about)
            with ThreadPoolExecutor(LANES, "state-disk") as pool:
                sums = pool.map(
                    lambda piece: _read_piece(descriptor, start + piece[0], piece[1], path), pieces
                )
                for (place, piece), found, expected in zip(pieces, sums, head["sums"], strict=True):
                    if found != expected:
                        raise _unusable(path, "its bytes are not as written")
                    if on_progress is not None:
                        on_progress(place + len(piece))
            return about
        finally:
            os.close(descriptor)

    def drop(self, name: str) -> None:
        partial = self._unique_partial(name)
        try:
            self.path(name).rename(partial)
        except FileNotFoundError:
            return
        self._unlinking.submit(partial.unlink, missing_ok=True)

    def settle(self) -> None:
        """Wait until every dropped file is deleted."""
        self._unlinking.submit(int).result()

    def close(self) -> None:
        """Wait for the last deletion, and end the thread."""
        self._unlinking.shutdown()

    def _unique_partial(self, name: str) -> Path:
        """An unused path for an incomplete or a dropped file."""
        path = self.path(name)
        return path.with_name(f"{path.stem}.{uuid.uuid4().hex}.partial")

    def _write(self, path: Path, pages: Bytes, about: dict[str, Any]) -> None:
        descriptor, self.direct = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            pieces = _pieces(pages)
            rough = json.dumps({"sums": [_LARGEST_SUM] * len(pieces), "about": about}).encode()
            begins = PAGE + align_up(len(rough), PAGE)
            os.posix_fallocate(descriptor, 0, begins + len(pages))  # a full disk says so here
            with ThreadPoolExecutor(LANES, "state-disk") as pool:
                sums = list(
                    pool.map(
                        lambda piece: _write_piece(descriptor, begins + piece[0], piece[1]), pieces
                    )
                )
            text = json.dumps({"sums": sums, "about": about}).encode()
            _write_piece(descriptor, PAGE, _pad(text, begins - PAGE))
            head = {"kind": _KIND, "bytes": len(pages), "begins": begins}
            _write_piece(descriptor, 0, _pad(json.dumps(head).encode(), PAGE))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _open(path: Path, flags: int) -> tuple[int, bool]:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:  # tmpfs and others know no direct I/O
            raise
    if flags & os.O_EXCL:
        path.unlink(missing_ok=True)
    return os.open(path, flags, 0o600), False


def _pieces(pages: Bytes) -> list[tuple[int, Bytes]]:
    return [(start, pages[start : start + PIECE]) for start in range(0, len(pages), PIECE)]


def _sum(piece: Bytes) -> int:
    import xxhash  # only where there is a disk tier

    return int(xxhash.xxh3_64_intdigest(piece.data))


def _write_piece(descriptor: int, place: int, piece: Bytes) -> int:
    view = piece.data
    while view:
        written = os.pwrite(descriptor, view, place)
        view, place = view[written:], place + written
    return _sum(piece)


def _read_piece(descriptor: int, place: int, piece: Bytes, path: Path) -> int:
    view = piece.data
    while view:
        got = os.preadv(descriptor, [view], place)
        if not got:
            raise _unusable(path, "it is cut short")
        view, place = view[got:], place + got
    return _sum(piece)


def _pad(text: bytes, size: int) -> Bytes:
    """The text in page-aligned memory, as direct I/O requires, padded with spaces."""
    if len(text) > size:
        raise ValueError("the header is longer than its block")
    block = mmap.mmap(-1, size)
    block[: len(text)] = text
    block[len(text) :] = b" " * (size - len(text))
    return np.frombuffer(block, dtype=np.uint8)


def _header(descriptor: int, path: Path) -> dict[str, Any]:
    """The header in the first pages: sizes, then checksums and the writer's `about`."""
    try:
        head: dict[str, Any] = _json_at(descriptor, 0, PAGE)
        if head["kind"] != _KIND:
            raise _unusable(path, "it is no state image")
        return head | _json_at(descriptor, PAGE, int(head["begins"]) - PAGE)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _unusable(path, "its header cannot be read") from error


def _json_at(descriptor: int, place: int, size: int) -> dict[str, Any]:
    if not 0 < size <= _LONGEST_HEADER:
        raise ValueError("no length of a header")
    block = _pad(b"", size)
    os.preadv(descriptor, [block.data], place)
    found = json.loads(block.tobytes())
    if not isinstance(found, dict):
        raise ValueError("no header")
    return found


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError.of("state image", str(path), f"cannot be used: {why}; restore a checkpoint")


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
