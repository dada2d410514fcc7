"""The depot: models, weight versions and saved states for nodes that do not share the control plane's disk.

    GET  /files/KIND/NAME[/FILE]       one file; a Range goes on where a connection broke
    GET  /files/KIND/NAME?list=1       the files of a folder, their sizes, and a fingerprint of all of them
    PUT  /uploads/ID/FILE              one file of something new
    POST /files/KIND/NAME?upload=ID    what was uploaded becomes visible under its name, whole

Every call needs the fleet's secret. Models can be read only; a model that changes on disk while the service runs is refused.
"""

import asyncio
import hmac
import shutil
import ssl
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from urllib.parse import unquote

from aiohttp import web

from slackwater.model.errors import ConfigError, NotFoundError, RefusedError, SlackwaterError
from slackwater.model.folder import changed, fingerprint
from slackwater.model.uri import Uri
from slackwater.runtime.net.listening import bound_socket

_CHUNK_BYTES = 1 << 20
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Depot:
    """Serves `root` (the state directory) and the models' own directories."""

    def __init__(self, root: Path, models: Mapping[str, Path], secret: str) -> None:
        self._root = root
        self._models = dict(models)
        self._fingerprints = {name: fingerprint(path) for name, path in models.items()}
        self._secret = secret
        self._uploads = root / "uploads"
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        """Listen; port 0 takes a free one. What was being uploaded before the last stop is dropped."""
        shutil.rmtree(self._uploads, ignore_errors=True)
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 50)
        app.router.add_get("/files/{kind}/{name:.+}", self._get)
        app.router.add_post("/files/{kind}/{name:.+}", self._commit)
        app.router.add_put("/uploads/{upload}/{file}", self._put)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        listening = bound_socket(host, port)
        self.port = listening.getsockname()[1]
        await web.SockSite(self._runner, listening, ssl_context=context).start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._secret.encode()):
            return web.Response(status=401, text="the fleet's secret is wrong")
        try:
            return await handler(request)
        except NotFoundError as error:
            return web.Response(status=404, text=str(error))
        except SlackwaterError as error:
            return web.Response(status=409, text=str(error))

    async def _get(self, request: web.Request) -> web.StreamResponse:
        uri = _uri_of(request)
        path = self._path(uri)
        if "list" in request.query:
            found = await asyncio.to_thread(self._listed, uri, path)
            return web.json_response(found)
        if not path.is_file():
            raise NotFoundError(f"{uri}: the fleet keeps no such file")
        whole = {"X-Slackwater-Bytes": str(path.stat().st_size)}
        return web.FileResponse(path, chunk_size=_CHUNK_BYTES, headers=whole)

    async def _put(self, request: web.Request) -> web.Response:
        upload, name = request.match_info["upload"], unquote(request.match_info["file"])
        if not upload.isalnum() or name in ("", ".", "..") or "/" in name:
            raise ConfigError.of("file", name, "must be a plain name")
        folder = self._uploads / upload
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as file:
            async for chunk in request.content.iter_chunked(_CHUNK_BYTES):
                await asyncio.to_thread(file.write, chunk)
        return web.Response()

    async def _commit(self, request: web.Request) -> web.Response:
        uri, upload = _uri_of(request), request.query.get("upload", "")
        if uri.kind == "models" or not upload.isalnum():
            raise RefusedError(f"{uri}: cannot be written by a node")
        source, target = self._uploads / upload, self._path(uri)
        if not source.is_dir():
            if target.exists():  # the answer to an earlier commit was lost
                return web.Response()
            raise NotFoundError(f"upload {upload}: is not here")
        await asyncio.to_thread(_make_visible, source, target, request.query.get("folder") == "1")
        return web.Response()

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

    def _listed(self, uri: Uri, path: Path) -> dict[str, object]:
        if not path.is_dir():
            raise NotFoundError(f"{uri}: the fleet keeps no such folder")
        found = fingerprint(path)
        if uri.kind == "models" and found != self._fingerprints.get(uri.name):
            raise RefusedError(changed(uri))
        return {"files": _files_of(path), "fingerprint": found}


def _uri_of(request: web.Request) -> Uri:
    return Uri.parse(f"slackwater:{request.match_info['kind']}/{request.match_info['name']}")


def _files_of(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.is_file()}


def _make_visible(source: Path, target: Path, folder: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if folder:
        if target.is_dir():
            shutil.rmtree(target)
        source.rename(target)
        return
    (only,) = source.iterdir()
    only.replace(target)
    source.rmdir()
