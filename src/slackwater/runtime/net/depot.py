"""The depot: models, weight versions and saved states for nodes without the control plane's disk.

    GET  /files/KIND/NAME[/FILE]       one file; a Range continues where a connection broke
    GET  /files/KIND/NAME?list=1       the files of a folder, their sizes, a fingerprint of all
    PUT  /uploads/ID/FILE              one file of something new
    POST /files/KIND/NAME?upload=ID    what was uploaded becomes visible under its name, whole

The first writer determines a weight version: equal bytes are accepted again, others refused. Its
SHA-256 goes with it to whoever fetches it. Every call needs the key of a running worker, which may
use only what the control plane has told it about. Models are read only, and refused if they change
on disk.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from urllib.parse import unquote

from aiohttp import web

from slackwater.model.errors import ConfigError, NotFoundError, RefusedError, SlackwaterError
from slackwater.model.folder import describe_change, fingerprint
from slackwater.model.uri import Uri, digest_file
from slackwater.runtime.launch.launch_plan import LaunchPlan, PlannedWorker
from slackwater.runtime.net.listening import (
    MOST_STRANGERS,
    UnprovenPeers,
    accept_connections,
    bind_same_port,
)
from slackwater.wire.proof import STRANGER_S

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
_HANG_UP = {"Connection": "close"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


_asking: ContextVar[PlannedWorker] = ContextVar("asking")  # of the request that is being answered


class Depot:
    """Serves `root` (the state directory) and the models' directories to the plan's workers."""

    def __init__(
        self,
        root: Path,
        models: Mapping[str, Path],
        plan: LaunchPlan,
        *,
        most_strangers: int = MOST_STRANGERS,
        stranger_s: float = STRANGER_S,
    ) -> None:
        self._root = root
        self._models = dict(models)
        self._fingerprints = {name: fingerprint(path) for name, path in models.items()}
        self._plan = plan
        self._uploads = root / "uploads"
        self._strangers = UnprovenPeers(most_strangers, stranger_s)
        self._digests: dict[Path, str] = {}  # of files that were uploaded and not committed yet
        self._committing = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._accepting: asyncio.Task[None] | None = None
        self.port = 0

    async def start(
        self,
        host: str,
        port: int,
        context: ssl.SSLContext | None,
        port_file: Path | None = None,
    ) -> None:
        """Listen; port 0 takes a free one, or the one that `port_file` keeps. Unfinished uploads of
        the last run are dropped.
        """
        shutil.rmtree(self._uploads, ignore_errors=True)
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 50)
        app.router.add_get("/files/{kind}/{name:.+}", self._get)
        app.router.add_post("/files/{kind}/{name:.+}", self._commit)
        app.router.add_put("/uploads/{upload}/{file}", self._put)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        listening = bind_same_port(host, port, port_file)
        self.port = listening.getsockname()[1]
        self._accepting = asyncio.create_task(self._accept(listening, context))

    async def close(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()

    async def _accept(self, listening: socket.socket, context: ssl.SSLContext | None) -> None:
        opening: set[asyncio.Task[None]] = set()
        async for connection, peer in accept_connections(listening):
            task = asyncio.create_task(self._open(connection, peer, context))
            opening.add(task)
            task.add_done_callback(opening.discard)

    async def _open(
        self, connection: socket.socket, peer: object, context: ssl.SSLContext | None
    ) -> None:
        """Hand a connection to the web server; its peer is unproven until a valid request."""
        server = None if self._runner is None else self._runner.server
        if server is None:  # it closes
            connection.close()
            return
        loop, opening = asyncio.get_running_loop(), asyncio.current_task()
        assert opening is not None
        self._strangers.add(peer, opening.cancel)
        try:
            transport, _ = await loop.connect_accepted_socket(server, connection, ssl=context)
        except (OSError, asyncio.CancelledError) as error:  # no TLS, or not in time
            self._strangers.remove(peer)
            logger.debug("peer refused reason=%s", error)
            return  # asyncio closes the connection
        if peer in self._strangers:  # not known by a first request yet
            self._strangers.add(peer, transport.abort)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        reader = self._plan.holder_of(key)
        if reader is None:
            return web.Response(
                status=401, text="this key is of no worker that runs", headers=_HANG_UP
            )
        _asking.set(reader)
        if request.transport is not None:
            self._strangers.remove(request.transport.get_extra_info("peername"))
        try:
            return await handler(request)
        except NotFoundError as error:
            return web.Response(status=404, text=str(error))
        except ConfigError as error:
            return web.Response(status=400, text=str(error))
        except SlackwaterError as error:
            return web.Response(status=409, text=str(error))

    async def _get(self, request: web.Request) -> web.StreamResponse:
        uri, reader = _uri_of(request), _asking.get()
        if not reader.may_read(uri):
            return _forbidden(f"{uri}: {reader.worker} was not told to use it")
        path = self._path(uri)
        if "list" in request.query:
            found = await asyncio.to_thread(self._list_folder, uri, path)
            return web.json_response(found)
        if not path.is_file():
            raise NotFoundError(f"{uri}: the fleet keeps no such file")
        whole = {"X-Slackwater-Bytes": str(path.stat().st_size)}
        with contextlib.suppress(OSError):
            whole["X-Slackwater-SHA256"] = digest_file(path).read_text()
        return web.FileResponse(path, chunk_size=_CHUNK_BYTES, headers=whole)

    async def _put(self, request: web.Request) -> web.Response:
        upload, name = request.match_info["upload"], unquote(request.match_info["file"])
        if not upload.isalnum() or name in ("", ".", "..") or "/" in name:
            raise ConfigError.of("file", name, "must be a plain name")
        if not _asking.get().writes:
            return _forbidden(f"{_asking.get().worker} was not told to write anything")
        folder = self._upload(_asking.get(), upload)
        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()

        def keep(chunk: bytes) -> None:
            file.write(chunk)
            digest.update(chunk)

        with (folder / name).open("wb") as file:
            async for chunk in request.content.iter_chunked(_CHUNK_BYTES):
                await asyncio.to_thread(keep, chunk)
        self._digests[folder / name] = digest.hexdigest()
        return web.Response()

    async def _commit(self, request: web.Request) -> web.Response:
        uri, upload = _uri_of(request), request.query.get("upload", "")
        if uri.kind == "models" or not upload.isalnum():
            raise RefusedError(f"{uri}: cannot be written by a node")
        reader = _asking.get()
        if str(uri) not in reader.writes:
            return _forbidden(f"{uri}: {reader.worker} was not told to write it")
        reader.check_commit(uri, upload)
        source, target = self._upload(reader, upload), self._path(uri)
        async with self._committing:
            if not source.is_dir():
                if target.exists():  # the answer to an earlier commit was lost
                    return web.Response()
                raise NotFoundError(f"upload {upload}: is not here")
            digests = {file: self._digests.pop(file, "") for file in sorted(source.iterdir())}
            folder = request.query.get("folder") == "1"
            await asyncio.to_thread(_make_visible, uri, digests, source, target, folder)
            reader.record_commit(uri, upload)
        return web.Response()

    def _upload(self, reader: PlannedWorker, upload: str) -> Path:
        """Where a worker puts what it uploads; another's uploads have other places."""
        owner = hashlib.sha256(reader.worker.encode()).hexdigest()[:16]
        return self._uploads / f"{owner}-{upload}"

    def _path(self, uri: Uri) -> Path:
        if uri.kind != "models":
            return self._root / uri.kind / uri.name
        for name, directory in self._models.items():
            if uri.name == name:
                return directory
            if uri.name.startswith(f"{name}/"):
                file = uri.name.removeprefix(f"{name}/")
                if file in _files_of(directory):
                    return directory / file
        raise NotFoundError(f"{uri}: is not a model of this service")

    def _list_folder(self, uri: Uri, path: Path) -> dict[str, object]:
        if not path.is_dir():
            raise NotFoundError(f"{uri}: the fleet keeps no such folder")
        found = fingerprint(path)
        if uri.kind == "models" and found != self._fingerprints.get(uri.name):
            raise RefusedError(describe_change(uri))
        return {"files": _files_of(path), "fingerprint": found}


def _forbidden(why: str) -> web.Response:
    return web.Response(status=403, text=why)


def _uri_of(request: web.Request) -> Uri:
    return Uri.parse(f"slackwater:{request.match_info['kind']}/{request.match_info['name']}")


def _files_of(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.is_file()}


def _make_visible(
    uri: Uri, digests: Mapping[Path, str], source: Path, target: Path, folder: bool
) -> None:
    """Under its name, whole; of an upload that is refused nothing is left."""
    if folder == (uri.kind == "weights") or (not folder and len(digests) != 1):
        shutil.rmtree(source)
        what = "a weight version is one file, and a state is a folder (folder=1)"
        raise ConfigError.of("upload", f"{len(digests)} files as {uri}", f"cannot be: {what}")
    target.parent.mkdir(parents=True, exist_ok=True)
    if folder:
        if target.is_dir():
            shutil.rmtree(target)
        source.rename(target)
        return
    ((only, digest),) = digests.items()
    try:
        os.link(only, target)  # a version is what its first writer made of it
        digest_file(target).write_text(digest)
    except FileExistsError:
        published = _digest_of(target)
        if published != digest:
            raise RefusedError(
                f"{uri}: is published with other bytes, sha256 {published[:16]}; "
                f"these have {digest[:16]}: publish them under a new name"
            ) from None
        only.replace(target)  # the same bytes, whatever has become of those on the disk since
    finally:
        shutil.rmtree(source)


def _digest_of(path: Path) -> str:
    try:
        return digest_file(path).read_text()
    except OSError:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
