"""Tokenizers over HTTP, as a Hugging Face hub serves them, for clients on other machines.

The SDK's `get_tokenizer()` calls `AutoTokenizer.from_pretrained(NAME)`. With
`HF_ENDPOINT=<service>/hub` and `HF_TOKEN=<key>` it finds this service's base models by name.
Weights are not served.
"""

import hashlib
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import FileResponse, JSONResponse, Response

from slackwater.model.errors import NotFoundError
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.store.base_models import BaseModel
from slackwater.serve.http.auth import Caller

FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


def tokenizer_routes(plane: ControlPlane) -> APIRouter:
    router = APIRouter(prefix="/hub", tags=["tokenizers"])

    def find(repository: str) -> BaseModel:
        """By name only: clients do not see paths."""
        named = {base.name: base for base in plane.bases}
        if repository not in named:
            raise NotFoundError(f"repository: {repository!r} is no base model of this service")
        return named[repository]

    @router.get("/api/models/{repository:path}/revision/{revision}")
    async def described_at(repository: str, revision: str, tenant: Caller) -> Any:
        del revision
        return _described(find(repository))

    @router.get("/api/models/{repository:path}/tree/{revision}/{folder:path}")
    async def folder(repository: str, revision: str, folder: str, tenant: Caller) -> Response:
        """Base models have no folders with further templates."""
        del revision, folder
        find(repository)
        return _no_entry("folder")

    @router.get("/api/models/{repository:path}")
    async def described(repository: str, tenant: Caller) -> Any:
        return _described(find(repository))

    @router.api_route("/{repository:path}/resolve/{revision}/{file}", methods=["GET", "HEAD"])
    async def resolve(repository: str, revision: str, file: str, tenant: Caller) -> Response:
        """One file; HEAD returns its size and ETag."""
        del revision
        base = find(repository)
        path = base.directory / file
        if file not in FILES or not path.is_file():
            return _no_entry(file)
        headers = {"etag": f'"{_digest([path])}"', "x-repo-commit": _commit(base)}
        return FileResponse(path, media_type="application/octet-stream", headers=headers)

    return router


def _described(base: BaseModel) -> dict[str, Any]:
    files = [{"rfilename": path.name} for path in _files(base)]
    commit = _commit(base)
    return {"id": base.name, "modelId": base.name, "sha": commit, "siblings": files, "tags": []}


def _no_entry(name: str) -> JSONResponse:
    error = f"{name}: is not there"
    return JSONResponse({"error": error}, 404, {"x-error-code": "EntryNotFound"})


def _files(base: BaseModel) -> list[Path]:
    return [base.directory / name for name in FILES if (base.directory / name).is_file()]


def _commit(base: BaseModel) -> str:
    """Changes when a file does, as a hub's commit would."""
    return _digest(_files(base))


def _digest(paths: list[Path]) -> str:
    found = hashlib.sha1(usedforsecurity=False)
    for path in paths:
        status = path.stat()
        found.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return found.hexdigest()
