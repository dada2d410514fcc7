"""Files and texts behind links that need no key and soon end."""

import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response

from slackwater.model.errors import NotFoundError

LINK_LIVES_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Offer:
    content: Path | bytes
    name: str
    ends_s: float


class Downloads:
    """Expiring links, which a restart revokes; `scratch` holds files made for one download."""

    def __init__(self, scratch: Path) -> None:
        self._offers: dict[str, _Offer] = {}
        self._scratch = scratch
        self._folders: dict[Path, float] = {}
        shutil.rmtree(scratch, ignore_errors=True)

    def new_folder(self) -> Path:
        """A folder for files that one download needs; those whose links have ended are removed."""
        now_s = time.time()
        for folder in [folder for folder, ends_s in self._folders.items() if ends_s <= now_s]:
            shutil.rmtree(folder, ignore_errors=True)
            del self._folders[folder]
        made = self._scratch / secrets.token_hex(12)
        self._folders[made] = now_s + 2 * LINK_LIVES_S
        return made

    def offer(self, request: Request, content: Path | bytes, name: str) -> tuple[str, float]:
        """A link to `content` for whoever sent the request, and when it ends."""
        now_s = time.time()
        self._offers = {key: held for key, held in self._offers.items() if held.ends_s > now_s}
        token = secrets.token_urlsafe(24)
        self._offers[token] = _Offer(content, name, now_s + LINK_LIVES_S)
        return f"{request.base_url}downloads/{token}/{quote(name)}", now_s + LINK_LIVES_S

    def take(self, token: str, name: str) -> _Offer:
        """What a link stands for; the file name is part of the link."""
        found = self._offers.get(token)
        if found is None or found.name != name or found.ends_s <= time.time():
            raise NotFoundError(
                "download: there is none under this link, or it has ended; ask for a new one"
            )
        return found


def download_routes(downloads: Downloads) -> APIRouter:
    router = APIRouter(tags=["downloads"])

    @router.get("/downloads/{token}/{name}")
    async def download(token: str, name: str) -> Response:
        offer = downloads.take(token, name)
        if isinstance(offer.content, Path):
            return FileResponse(offer.content, filename=offer.name)
        shown = {"content-disposition": f"attachment; filename*=utf-8''{quote(name)}"}
        return Response(offer.content, media_type="application/json", headers=shown)

    return router
