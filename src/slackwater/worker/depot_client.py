"""Client of the control plane's depot: HTTP with a bearer token, resumed after a broken link."""

import hashlib
import http.client
import json
import time
import urllib.parse
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from slackwater.model.errors import ConfigError, NotFoundError, UnavailableError
from slackwater.model.uri import Uri
from slackwater.wire.proof import pinned

_TIMEOUT_S = 60.0
_TRIES = 5
_CHUNK_BYTES = 1 << 20
T = TypeVar("T")


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
