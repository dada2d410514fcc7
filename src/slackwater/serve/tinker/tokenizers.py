"""Serves tokenizers over HTTP like a Hugging Face hub, for clients on other machines.

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

FILES = (  # of a model directory, beside the weights
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
        """Find by name only: clients must not see paths."""
        named = {base.name: base for base in plane.bases}
        if repository not in named:
            raise NotFoundError(f"repository: {repository!r} is not a base model of this service")
        return named[repository]

    @router.get("/api/models/{repository:path}/revision/{revision}", name="described_at")
    async def revision_info(repository: str, revision: str, tenant: Caller) -> Any:
        del revision
        return _model_info(find(repository))

    @router.get("/api/models/{repository:path}/tree/{revision}/{folder:path}")
    async def folder(repository: str, revision: str, folder: str, tenant: Caller) -> Response:
        """Always 404: base models have no folder of further templates."""
        del revision, folder
        find(repository)
        return _missing_entry("folder")

    @router.get("/api/models/{repository:path}", name="described")
    async def model_info(repository: str, tenant: Caller) -> Any:
        return _model_info(find(repository))

    @router.get("/{repository:path}/resolve/{revision}/{file}")
    @router.head("/{repository:path}/resolve/{revision}/{file}")
    async def resolve(repository: str, revision: str, file: str, tenant: Caller) -> Response:
        """One file; HEAD returns its size and ETag."""
        del revision
        base = find(repository)
        path = base.directory / file
        if file not in FILES or not path.is_file():
            return _missing_entry(file)
        headers = {"etag": f'"{_digest([path])}"', "x-repo-commit": _commit(base)}
        return FileResponse(path, media_type="application/octet-stream", headers=headers)

    return router


def _model_info(base: BaseModel) -> dict[str, Any]:
    files = [{"rfilename": path.name} for path in tokenizer_files(base)]
    commit = _commit(base)
    return {"id": base.name, "modelId": base.name, "sha": commit, "siblings": files, "tags": []}


def _missing_entry(name: str) -> JSONResponse:
    error = f"{name}: does not exist"
    return JSONResponse({"error": error}, 404, {"x-error-code": "EntryNotFound"})


def tokenizer_files(base: BaseModel) -> list[Path]:
    return [base.directory / name for name in FILES if (base.directory / name).is_file()]


def _commit(base: BaseModel) -> str:
    """Changes when a file does, as a hub's commit would."""
    return _digest(tokenizer_files(base))


def _digest(paths: list[Path]) -> str:
    found = hashlib.sha1(usedforsecurity=False)
    for path in paths:
        status = path.stat()
        found.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return found.hexdigest()
