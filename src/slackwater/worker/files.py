"""A node's files: finds models, states and versions by URI, and stores workers' results.

`SharedFiles` is for nodes that share the control plane's disk. `DepotFiles` is for all others: it
fetches files from the depot over HTTP into a cache, and uploads results, which become visible when
they are complete.
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
from slackwater.model.folder import describe_change, fingerprint
from slackwater.model.uri import Uri, version_uri
from slackwater.tensors.header import TensorHeader
from slackwater.weights.catalog import parts_of
from slackwater.weights.directory import DirectoryWeightStore
from slackwater.weights.plan.shard_map import RankShards
from slackwater.wire.proof import wrap_pinned

logger = logging.getLogger(__name__)

MODELS_INDEX = "models.json"
_MAX_CACHED_VERSIONS = 32
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
        self.sock = wrap_pinned(self.sock, self._pin)


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
        def attempt() -> DepotListing:
            with self._request("GET", _path(uri, query="list=1")) as response:
                content = json.loads(response.read())
            return DepotListing(content["files"], content["fingerprint"])

        return self._retry(attempt)

    def fetch(self, uri: Uri, name: str | None, target: Path) -> None:
        """Fetch one file to `target` atomically, resuming after broken connections."""
        partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()

        def attempt() -> None:
            nonlocal digest
            received = partial.stat().st_size if partial.exists() else 0
            headers = {"Range": f"bytes={received}-"} if received else {}
            with self._request("GET", _path(uri, name), headers) as response:
                resumed = response.status == http.HTTPStatus.PARTIAL_CONTENT
                if not resumed:
                    digest = hashlib.sha256()
                with partial.open("ab" if resumed else "wb") as file:
                    while chunk := response.read(_CHUNK_BYTES):
                        file.write(chunk)
                        digest.update(chunk)
            expected_bytes = int(response.headers.get("X-Slackwater-Bytes", "-1"))
            if partial.stat().st_size != expected_bytes:
                raise ConnectionError(f"{partial.stat().st_size} of {expected_bytes} bytes came")
            expected = response.headers.get("X-Slackwater-SHA256")
            if expected not in (None, digest.hexdigest()):
                partial.unlink()
                actual = digest.hexdigest()[:16]
                raise ConnectionError(f"{uri} came with sha256 {actual}, not {expected[:16]}")

        try:
            self._retry(attempt)
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)

    def put_file(self, uri: Uri, file: Path) -> None:
        """Upload one file; it becomes visible when it is complete."""
        self._put(uri, {file.name: file}, folder=False)

    def put_folder(self, uri: Uri, files: Sequence[Path]) -> None:
        """Upload files as a folder; it becomes visible when all are complete."""
        self._put(uri, {file.name: file for file in files}, folder=True)

    def _put(self, uri: Uri, files: Mapping[str, Path], *, folder: bool) -> None:
        upload = uuid.uuid4().hex
        for name, file in files.items():
            self._retry(partial(self._send, upload, name, file))
        query = urllib.parse.urlencode({"upload": upload, "folder": int(folder)})

        def commit() -> None:
            with self._request("POST", _path(uri, query=query)) as response:
                response.read()

        self._retry(commit)

    def _send(self, upload: str, name: str, file: Path) -> None:
        path = f"/uploads/{upload}/{urllib.parse.quote(name, safe='')}"
        with file.open("rb") as body:
            length = {"Content-Length": str(file.stat().st_size)}
            with self._request("PUT", path, length, body) as response:
                response.read()

    def _request(
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
        response = connection.getresponse()
        if response.status >= 400:
            reason = response.read(4096).decode(errors="replace").strip()
            if response.status >= 500:
                raise ConnectionError(f"the depot answered {response.status}: {reason}")
            kind = (
                NotFoundError if response.status == http.HTTPStatus.NOT_FOUND else UnavailableError
            )
            raise kind(reason or f"the depot answered {response.status}")
        return response

    def _retry(self, attempt: Callable[[], T]) -> T:
        for retry in range(_TRIES):
            try:
                return attempt()
            except (TimeoutError, OSError, http.client.HTTPException) as error:
                if isinstance(error, UnavailableError):
                    raise
                last = error
                time.sleep(0.2 * 2**retry)
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
            entry = json.loads((self._root / MODELS_INDEX).read_text())[name]
        except (OSError, ValueError, KeyError):
            raise NotFoundError(f"model {uri}: is not one that this service offers") from None
        directory = Path(entry["directory"])
        if fingerprint(directory) != entry["fingerprint"]:
            raise RefusedError(describe_change(uri))
        return directory

    @contextlib.contextmanager
    def open_state(self, uri: str) -> Iterator[Path]:
        """The folder of a saved state, read-only."""
        yield self._path(uri)

    @contextlib.contextmanager
    def create_state(self, uri: str) -> Iterator[Path]:
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
        cached = self._cache / "models" / f"{parsed.name.replace('/', '%2F')}@{listing.fingerprint}"
        fingerprint_file = cached.with_name(f".{cached.name}.written")
        with _lock_path(cached):
            if not (cached.is_dir() and _is_unchanged(cached, fingerprint_file)):
                shutil.rmtree(cached, ignore_errors=True)
                self._fetch_folder(parsed, cached)
                fingerprint_file.write_text(fingerprint(cached))
        return cached

    @contextlib.contextmanager
    def open_state(self, uri: str) -> Iterator[Path]:
        folder = self._cache / "passing" / uuid.uuid4().hex
        try:
            self._fetch_folder(Uri.parse(uri), folder)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def create_state(self, uri: str) -> Iterator[Path]:
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
def _lock_path(cached: Path) -> Iterator[None]:
    """A lock beside a path: the first worker of a node fetches it, the others wait."""
    cached.parent.mkdir(parents=True, exist_ok=True)
    with cached.with_name(f".{cached.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_unchanged(cached: Path, fingerprint_file: Path) -> bool:
    try:
        return fingerprint_file.read_text() == fingerprint(cached)
    except OSError:
        return False


class DepotWeightStore:
    """The weight store over the depot, with recent versions cached in a folder.

    The depot is authoritative. A damaged cached file (bad disk, torn write) is dropped and fetched
    again: it would fail every pull, and it outlives worker and agent.
    """

    def __init__(self, depot: DepotClient, cache: Path) -> None:
        self._depot = depot
        self._cache = DirectoryWeightStore(cache)

    def publish(
        self,
        version: str,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        *,
        durable: bool = True,
    ) -> None:
        with contextlib.suppress(NotFoundError):
            self._drop_damaged(version, lambda: self._cache.pull(version))
        self._cache.publish(version, tensors, meta, durable=durable)
        try:
            self._depot.put_file(version_uri(version), self._cache.path(version))
        except SlackwaterError:
            self._cache.drop(version)  # the cached file is not the fleet's version
            raise
        self._evict_oldest()

    def pull(self, version: str, device: str = "cpu") -> dict[str, Tensor]:
        return self._read(version, lambda: self._cache.pull(version, device))

    def pull_slices(self, version: str, receiver: RankShards) -> tuple[dict[str, Tensor], int]:
        return self._read(version, lambda: self._cache.pull_slices(version, receiver))

    def manifest(self, version: str) -> TensorHeader:
        return self._read(version, lambda: self._cache.manifest(version))

    def _read(self, version: str, read: Callable[[], T]) -> T:
        def read_whole() -> T:
            for part in parts_of(version, self._cache.meta(version)):
                self._fetch(part)
            return read()

        self._fetch(version)
        result = self._drop_damaged(version, read_whole)
        if result is None:
            self._fetch(version)
            result = read_whole()
        return result

    def _drop_damaged(self, version: str, read: Callable[[], T]) -> T | None:
        """The result of `read`; None if the cached file was damaged and dropped."""
        try:
            return read()
        except ConfigError as error:
            logger.warning("kept version dropped version=%s: %s", version, error)
            self._cache.drop(version)
            return None

    def _fetch(self, version: str) -> None:
        path = self._cache.path(version)
        if path.is_file():
            return
        # An engine's ranks fetch the same parts at once. Lock files stay, so there are few.
        lock = path.with_name(f"fetching-{zlib.crc32(path.name.encode()) % _LOCKS}")
        with _lock_path(lock):
            if not path.is_file():
                self._depot.fetch(version_uri(version), None, path)
                self._evict_oldest()

    def _evict_oldest(self) -> None:
        by_age = sorted(self._cache.versions(), key=lambda v: self._cache.path(v).stat().st_mtime)
        for version in by_age[:-_MAX_CACHED_VERSIONS]:
            self._cache.drop(version)


NodeFiles: TypeAlias = SharedFiles | DepotFiles
WeightStore: TypeAlias = DirectoryWeightStore | DepotWeightStore


def node_files(location: str, secret: str, pin: str | None) -> NodeFiles:
    """From `--files`: `folder:DIRECTORY`, or `URL=CACHE`."""
    if location.startswith("folder:"):
        return SharedFiles(Path(location.removeprefix("folder:")))
    url, equals, cache = location.partition("=")
    if not equals:
        raise ConfigError.of(
            "--files", location, "must be folder:DIRECTORY, or URL=CACHE of a depot"
        )
    return DepotFiles(DepotClient(url, secret, pin), Path(cache))
