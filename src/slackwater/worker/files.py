"""A node's files: finds what URIs name and stores what workers make.

`SharedFiles` is for nodes that share the control plane's disk. `DepotFiles` is for all others: it
caches what it fetches from the depot over HTTP, and uploads results, which become visible when they
are complete.
"""

import contextlib
import fcntl
import hashlib
import http.client
import json
import logging
import shutil
import time
import urllib.parse
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

from torch import Tensor

from slackwater.model.errors import (
    ConfigError,
    NotFoundError,
    RefusedError,
    SlackwaterError,
    UnavailableError,
)
from slackwater.model.folder import changed, fingerprint
from slackwater.model.uri import Uri, version_uri
from slackwater.tensors.header import TensorHeader
from slackwater.weights.catalog import parts_of
from slackwater.weights.directory import DirectoryWeightStore
from slackwater.weights.plan.shard_map import RankShards
from slackwater.wire.proof import pinned

logger = logging.getLogger(__name__)

MODELS_INDEX = "models.json"
_VERSIONS_KEPT = 32
_LOCKS = 16
T = TypeVar("T")

_TIMEOUT_S = 60.0
_TRIES = 5
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DepotListing:
    """A folder's files and sizes; the fingerprint changes when any file does."""

    files: Mapping[str, int]
    fingerprint: str


class _PinnedConnection(http.client.HTTPConnection):
    """HTTP over a connection with the fleet's pinned certificate."""

    def __init__(self, host: str, port: int, pin: str) -> None:
        super().__init__(host, port, timeout=_TIMEOUT_S)
        self._pin = pin

    def connect(self) -> None:
        super().connect()
        self.sock = pinned(self.sock, self._pin)


class DepotClient:
    """One depot; a connection per call, so that a broken one costs one retry."""

    def __init__(self, url: str, secret: str, pin: str | None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None or parts.port is None:
            raise ConfigError.of("depot", url, "must be http://HOST:PORT or https://HOST:PORT")
        if parts.scheme == "https" and pin is None:
            raise ConfigError.of("depot", url, "needs the fleet's certificate pin")
        self._host, self._port = parts.hostname, parts.port
        self._pin = pin if parts.scheme == "https" else None
        self._headers = {"Authorization": f"Bearer {secret}"}

    def listing(self, uri: Uri) -> DepotListing:
        """The contents of a folder."""

        def ask() -> DepotListing:
            with self._answer("GET", _path(uri, query="list=1")) as answer:
                found = json.loads(answer.read())
            return DepotListing(found["files"], found["fingerprint"])

        return self._patiently(ask)

    def fetch(self, uri: Uri, name: str | None, target: Path) -> None:
        """Fetch one file to `target` atomically, resuming after broken connections."""
        partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()

        def ask() -> None:
            nonlocal digest
            have = partial.stat().st_size if partial.exists() else 0
            headers = {"Range": f"bytes={have}-"} if have else {}
            with self._answer("GET", _path(uri, name), headers) as answer:
                resumed = answer.status == http.HTTPStatus.PARTIAL_CONTENT
                if not resumed:
                    digest = hashlib.sha256()
                with partial.open("ab" if resumed else "wb") as file:
                    while chunk := answer.read(_CHUNK_BYTES):
                        file.write(chunk)
                        digest.update(chunk)
            whole = int(answer.headers.get("X-Slackwater-Bytes", "-1"))
            if partial.stat().st_size != whole:
                raise ConnectionError(f"{partial.stat().st_size} of {whole} bytes came")
            wanted = answer.headers.get("X-Slackwater-SHA256")
            if wanted not in (None, digest.hexdigest()):
                partial.unlink()
                found = digest.hexdigest()[:16]
                raise ConnectionError(f"{uri} came with sha256 {found}, not {wanted[:16]}")

        try:
            self._patiently(ask)
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)

    def put_file(self, uri: Uri, file: Path) -> None:
        """Send one file; it is visible when it is whole."""
        self._put(uri, {file.name: file}, folder=False)

    def put_folder(self, uri: Uri, files: Sequence[Path]) -> None:
        """Send files as a folder; it is visible when all of them are there."""
        self._put(uri, {file.name: file for file in files}, folder=True)

    def _put(self, uri: Uri, files: Mapping[str, Path], *, folder: bool) -> None:
        upload = uuid.uuid4().hex
        for name, file in files.items():
            self._patiently(partial(self._send, upload, name, file))
        query = urllib.parse.urlencode({"upload": upload, "folder": int(folder)})

        def commit() -> None:
            with self._answer("POST", _path(uri, query=query)) as answer:
                answer.read()

        self._patiently(commit)

    def _send(self, upload: str, name: str, file: Path) -> None:
        path = f"/uploads/{upload}/{urllib.parse.quote(name, safe='')}"
        with file.open("rb") as body:
            length = {"Content-Length": str(file.stat().st_size)}
            with self._answer("PUT", path, length, body) as answer:
                answer.read()

    def _answer(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: IO[bytes] | None = None,
    ) -> http.client.HTTPResponse:
        if self._pin is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        else:
            connection = _PinnedConnection(self._host, self._port, self._pin)
        connection.request(method, path, body, {**self._headers, **(headers or {})})
        answer = connection.getresponse()
        if answer.status >= 400:
            said = answer.read(4096).decode(errors="replace").strip()
            if answer.status >= 500:
                raise ConnectionError(f"the depot answered {answer.status}: {said}")
            kind = NotFoundError if answer.status == http.HTTPStatus.NOT_FOUND else UnavailableError
            raise kind(said or f"the depot answered {answer.status}")
        return answer

    def _patiently(self, ask: Callable[[], T]) -> T:
        for attempt in range(_TRIES):
            try:
                return ask()
            except (TimeoutError, OSError, http.client.HTTPException) as error:
                if isinstance(error, UnavailableError):
                    raise
                last = error
                time.sleep(0.2 * 2**attempt)
        raise UnavailableError(f"the depot at {self._host}:{self._port} does not answer: {last}")


def _path(uri: Uri, name: str | None = None, query: str = "") -> str:
    parts = [uri.kind, *uri.name.split("/"), *([name] if name is not None else [])]
    path = "/files/" + "/".join(urllib.parse.quote(part, safe="") for part in parts)
    return f"{path}?{query}" if query else path


class SharedFiles:
    """The control plane's own state directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def model(self, uri: str) -> Path:
        """The directory of a base model."""
        name = Uri.parse(uri).name
        try:
            listed = json.loads((self._root / MODELS_INDEX).read_text())[name]
        except (OSError, ValueError, KeyError):
            raise NotFoundError(f"model {uri}: is not one that this service offers") from None
        directory = Path(listed["directory"])
        if fingerprint(directory) != listed["fingerprint"]:
            raise RefusedError(changed(uri))
        return directory

    @contextlib.contextmanager
    def saved_state(self, uri: str) -> Iterator[Path]:
        """The folder of a saved state, to be read."""
        yield self._path(uri)

    @contextlib.contextmanager
    def new_state(self, uri: str) -> Iterator[Path]:
        """A folder for a new state, which becomes visible when the block succeeds."""
        yield self._path(uri)

    def weights(self) -> DirectoryWeightStore:
        """The fleet's weight versions."""
        return DirectoryWeightStore(self._root / "weights")

    def _path(self, uri: str) -> Path:
        parsed = Uri.parse(uri)
        return self._root / parsed.kind / parsed.name


class DepotFiles:
    """A folder of this node, filled from the control plane's depot."""

    def __init__(self, depot: DepotClient, cache: Path) -> None:
        self._depot = depot
        self._cache = cache
        cache.mkdir(parents=True, exist_ok=True)

    def model(self, uri: str) -> Path:
        parsed = Uri.parse(uri)
        listing = self._depot.listing(parsed)
        kept = self._cache / "models" / f"{parsed.name.replace('/', '%2F')}@{listing.fingerprint}"
        written = kept.with_name(f".{kept.name}.written")
        with _alone(kept):
            if not (kept.is_dir() and _is_as_written(kept, written)):
                shutil.rmtree(kept, ignore_errors=True)
                self._fetch_folder(parsed, kept)
                written.write_text(fingerprint(kept))
        return kept

    @contextlib.contextmanager
    def saved_state(self, uri: str) -> Iterator[Path]:
        folder = self._cache / "passing" / uuid.uuid4().hex
        try:
            self._fetch_folder(Uri.parse(uri), folder)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def new_state(self, uri: str) -> Iterator[Path]:
        folder = self._cache / "passing" / uuid.uuid4().hex
        folder.mkdir(parents=True)
        try:
            yield folder
            files = [file for file in sorted(folder.iterdir()) if file.is_file()]
            self._depot.put_folder(Uri.parse(uri), files)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def weights(self) -> "DepotWeightStore":
        return DepotWeightStore(self._depot, self._cache / "weights")

    def _fetch_folder(self, uri: Uri, target: Path) -> None:
        """Fetch all files into a temporary folder and rename it."""
        partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
        partial.mkdir(parents=True)
        try:
            before = self._depot.listing(uri)
            for name in before.files:
                self._depot.fetch(uri, name, partial / name)
            if self._depot.listing(uri) != before:
                raise RefusedError(f"{uri}: its files changed while they were fetched")
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _alone(kept: Path) -> Iterator[None]:
    """Workers of one node fetch a thing once: the others wait for the first."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.with_name(f".{kept.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_as_written(kept: Path, written: Path) -> bool:
    """Whether a folder that was fetched once has been left alone since."""
    try:
        return written.read_text() == fingerprint(kept)
    except OSError:
        return False


class DepotWeightStore:
    """The weight store over the depot, with recent versions cached in a folder.

    The depot is authoritative. A damaged cached file (bad disk, torn write) is dropped and fetched
    again: it would fail every pull, and it outlives worker and agent.
    """

    def __init__(self, depot: DepotClient, cache: Path) -> None:
        self._depot = depot
        self._kept = DirectoryWeightStore(cache)

    def publish(
        self,
        version: str,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        *,
        durable: bool = True,
    ) -> None:
        with contextlib.suppress(NotFoundError):
            self._drop_damaged(version, lambda: self._kept.pull(version))
        self._kept.publish(version, tensors, meta, durable=durable)
        try:
            self._depot.put_file(version_uri(version), self._kept.path(version))
        except SlackwaterError:
            self._kept.drop(version)  # it is not what the fleet calls so
            raise
        self._make_room()

    def pull(self, version: str, device: str = "cpu") -> dict[str, Tensor]:
        return self._read(version, lambda: self._kept.pull(version, device))

    def pull_slices(self, version: str, receiver: RankShards) -> tuple[dict[str, Tensor], int]:
        return self._read(version, lambda: self._kept.pull_slices(version, receiver))

    def manifest(self, version: str) -> TensorHeader:
        return self._read(version, lambda: self._kept.manifest(version))

    def _read(self, version: str, read: Callable[[], T]) -> T:
        def read_whole() -> T:
            self._fetch_parts(version)
            return read()

        self._fetch(version)
        found = self._drop_damaged(version, read_whole)
        if found is None:
            self._fetch(version)
            found = read_whole()
        return found

    def _drop_damaged(self, version: str, read: Callable[[], T]) -> T | None:
        """The result of `read`; None if the cached file was damaged and dropped."""
        try:
            return read()
        except ConfigError as error:
            logger.warning("kept version dropped version=%s: %s", version, error)
            self._kept.drop(version)
            return None

    def _fetch(self, version: str) -> None:
        path = self._kept.path(version)
        if path.is_file():
            return
        # The ranks of an engine want the same parts at the same time. Few locks, since they stay.
        lock = path.with_name(f"fetching-{zlib.crc32(path.name.encode()) % _LOCKS}")
        with _alone(lock):
            if not path.is_file():
                self._depot.fetch(version_uri(version), None, path)
                self._make_room()

    def _fetch_parts(self, version: str) -> None:
        for part in parts_of(version, self._kept.meta(version)):
            self._fetch(part)

    def _make_room(self) -> None:
        """Keep the newest cached versions."""
        by_age = sorted(self._kept.versions(), key=lambda v: self._kept.path(v).stat().st_mtime)
        for version in by_age[:-_VERSIONS_KEPT]:
            self._kept.drop(version)


NodeFiles: TypeAlias = SharedFiles | DepotFiles
WeightStore: TypeAlias = DirectoryWeightStore | DepotWeightStore


def node_files(where: str, secret: str, pin: str | None) -> NodeFiles:
    """From `--files`: `folder:DIRECTORY`, or `URL=CACHE`."""
    if where.startswith("folder:"):
        return SharedFiles(Path(where.removeprefix("folder:")))
    url, equals, cache = where.partition("=")
    if not equals:
        raise ConfigError.of("--files", where, "must be folder:DIRECTORY, or URL=CACHE of a depot")
    return DepotFiles(DepotClient(url, secret, pin), Path(cache))
