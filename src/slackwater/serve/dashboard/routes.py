"""The dashboard over HTTP: pages, logins, figures once a second, and changes.

A login trades a key for a cookie that scripts cannot read and other sites' requests do not carry
(`HttpOnly`, `SameSite=Strict`). Every change is a POST from the same origin with the session's
token. Pages load nothing from other sites and run no inline script, so that a job's name can never
run as code.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import RedirectResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from slackwater.model.errors import NotFoundError
from slackwater.model.ids import TenantId
from slackwater.serve.dashboard.browser_sessions import BrowserSession, BrowserSessions, Viewer
from slackwater.serve.dashboard.source import DashboardSource
from slackwater.serve.dashboard.what_if import FleetChange, Planner
from slackwater.serve.http.errors import ForbiddenError, UnauthorizedError
from slackwater.timeline.lanes import TimelineWindow

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
_EVERY_S = 1.0
_COST_SHARE = 0.01  # of a core that the figures of one audience may cost
_OVERVIEW_EVERY_S = 5.0
_LANES_AT_ONCE = 20

Job = Annotated[str, Query(max_length=200)]
Place = Annotated[int, Query(ge=-(1 << 53), le=1 << 53)]
Seconds = Annotated[float, Query(ge=-1e9, le=1e9, allow_inf_nan=False)]


class LoginBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    key: Annotated[str, Field(max_length=500)]


class FigureCache:
    """Caches encoded figures that viewers share, for `every_s` or longer.

    Costly figures are kept longer, so that they take at most a hundredth of a core.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._entries: dict[Any, tuple[float, bytes]] = {}

    def get(self, key: Any, make: Callable[[], Any]) -> bytes:
        cached = self.get_fresh(key)
        if cached is None:
            began_s = time.thread_time()
            cached = msgspec.json.encode(make())
            self.put(key, cached, time.thread_time() - began_s)
        return cached

    def get_fresh(self, key: Any) -> bytes | None:
        cached = self._entries.get(key)
        return None if cached is None or time.monotonic() >= cached[0] else cached[1]

    def put(self, key: Any, made: bytes, cost_s: float) -> None:
        until_s = time.monotonic() + max(self._every_s, cost_s / _COST_SHARE)
        self._entries[key] = (until_s, made)


class Dashboard:
    """State of the routes: the source, logins, and cached figures."""

    def __init__(self, source: DashboardSource) -> None:
        self.source = source
        self.sessions = BrowserSessions(time.monotonic)
        self.figures = FigureCache(0.9 * _EVERY_S)
        self.overviews = FigureCache(_OVERVIEW_EVERY_S)
        self._overview_lock = asyncio.Lock()
        self.planner = Planner()

    # Dependencies are async so that FastAPI does not run them in threads.
    async def session(self, request: Request) -> BrowserSession:
        _refuse_other_sites(request)
        found = self.sessions.find(_token(request))
        if found is None:
            raise UnauthorizedError("session: none, or it has expired; log in with an API key")
        return found

    async def viewer(self, request: Request) -> Viewer:
        return (await self.session(request)).viewer

    async def changer(self, request: Request) -> Viewer:
        """The viewer of a change; the CSRF token proves that our own page sent it."""
        session = await self.session(request)
        token = request.headers.get("x-csrf-token", "")
        if not secrets.compare_digest(token.encode(), session.csrf.encode()):
            raise ForbiddenError("x-csrf-token: is not this session's; reload the dashboard")
        return session.viewer

    def job_filter(self, viewer: Viewer) -> Callable[[str], bool] | None:
        """The predicate of jobs that the viewer may see; None: all."""
        return None if viewer.is_operator else lambda job: self.source.sees(viewer, job)

    async def overview(self, viewer: Viewer) -> bytes:
        """The whole run as a strip; yields to the event loop every few lanes."""
        key = _audience(viewer)
        async with self._overview_lock:
            if (cached := self.overviews.get_fresh(key)) is not None:
                return cached
            timeline, spent_s = self.source.timeline, 0.0
            made = timeline.overview(self.source.now_s(), self.job_filter(viewer))
            lanes = timeline.lanes()
            for first in range(0, len(lanes), _LANES_AT_ONCE):
                began_s = time.thread_time()
                for lane in lanes[first : first + _LANES_AT_ONCE]:
                    made.add(lane)
                spent_s += time.thread_time() - began_s
                await asyncio.sleep(0)
            cached = msgspec.json.encode(made.figures())
            self.overviews.put(key, cached, spent_s)
            return cached

    async def stream(self, token: str, session: BrowserSession) -> AsyncIterator[bytes]:
        """Send figures once a second until the session or the service ends."""
        viewer, sent = session.viewer, b""
        while not self.source.is_closing() and self.sessions.find(token) is session:
            made = self.figures.get(_audience(viewer), lambda: self.source.snapshot(viewer))
            yield b": same\n\n" if made == sent else b"event: snapshot\ndata: %b\n\n" % made
            sent = made
            await asyncio.sleep(_EVERY_S)
        yield b"event: end\ndata: {}\n\n"


def dashboard_routes(source: DashboardSource) -> APIRouter:
    """Routes below `/dashboard`, which the OpenAPI document leaves out."""
    router, dashboard = APIRouter(prefix="/dashboard", include_in_schema=False), Dashboard(source)
    for routes in (_add_pages, _add_logins, _add_figures, _add_changes):
        routes(router, dashboard)
    return router


def _add_pages(router: APIRouter, dashboard: Dashboard) -> None:
    pages = resources.files("slackwater.serve.dashboard") / "static"

    known: dict[str, tuple[bytes, str]] = {}

    def file(request: Request, name: str) -> Response:
        if name not in _NAMES:
            raise NotFoundError(f"no such file: {name[:100]!r}")
        if name not in known:
            found = (pages / name).read_bytes()
            known[name] = (found, f'"{hashlib.sha256(found).hexdigest()[:24]}"')
        content, tag = known[name]
        headers = HEADERS | {"cache-control": "no-cache", "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=TYPES[name.rpartition(".")[2]], headers=headers)

    @router.get("/")
    async def slash() -> Response:
        return RedirectResponse("/dashboard")

    @router.get("")
    async def page(request: Request) -> Response:
        return file(request, "index.html")

    @router.get("/static/{name}")
    async def static(request: Request, name: str) -> Response:
        return file(request, name)


def _add_logins(router: APIRouter, dashboard: Dashboard) -> None:
    @router.post("/api/login")
    async def login(request: Request, body: LoginBody) -> Response:
        _refuse_other_sites(request)
        viewer = dashboard.source.viewer(body.key.strip())
        if viewer is None:
            raise UnauthorizedError(
                "key: not known here; take one that `slackwater up` printed, not a job's"
            )
        token, session = dashboard.sessions.begin(viewer)
        response = _json(_session_facts(dashboard.source, session))
        response.set_cookie(
            _cookie_name(request),
            token,
            path="/dashboard",
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    @router.get("/api/session")
    async def session(found: Annotated[BrowserSession, Depends(dashboard.session)]) -> Response:
        return _json(_session_facts(dashboard.source, found))

    @router.post("/api/logout", dependencies=[Depends(dashboard.changer)])
    async def logout(request: Request) -> Response:
        dashboard.sessions.end(_token(request))
        response = _json({})
        response.delete_cookie(_cookie_name(request), path="/dashboard")
        return response


def _add_figures(router: APIRouter, dashboard: Dashboard) -> None:
    source = dashboard.source
    viewing = Annotated[Viewer, Depends(dashboard.viewer)]

    @router.get("/api/events")
    async def events(
        request: Request, found: Annotated[BrowserSession, Depends(dashboard.session)]
    ) -> Response:
        headers = HEADERS | {"cache-control": "no-store", "x-accel-buffering": "no"}
        stream = dashboard.stream(_token(request), found)
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    @router.get("/api/timeline")
    async def timeline(
        viewer: viewing,
        start: Seconds,
        end: Seconds,
        width: Annotated[int, Query(ge=10, le=8000)] = 1200,
        first: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
        count: Annotated[int, Query(ge=0, le=400)] = 60,
        since: Seconds | None = None,
        names: Annotated[str, Query(max_length=40)] = "",
    ) -> Response:
        window = TimelineWindow(
            start, max(end, start + 1e-3), width, first, count, since_s=since, names=names
        )
        return _json(source.timeline.window(window, source.now_s(), dashboard.job_filter(viewer)))

    @router.get("/api/overview")
    async def overview(viewer: viewing) -> Response:
        return _encode_response(await dashboard.overview(viewer))

    @router.get("/api/job")
    async def job(viewer: viewing, job: Job) -> Response:
        return _json(await source.job(viewer, job))

    @router.get("/api/conversation")
    async def conversation(viewer: viewing, job: Job, trajectory: Job) -> Response:
        return _json(await source.conversation(viewer, job, trajectory))

    @router.get("/api/logs")
    async def logs(viewer: viewing, job: Job, place: Place = -65536) -> Response:
        return _json(source.logs(viewer, job, place))


def _add_changes(router: APIRouter, dashboard: Dashboard) -> None:
    source = dashboard.source
    changing = Annotated[Viewer, Depends(dashboard.changer)]

    @router.post("/api/stop")
    async def stop(viewer: changing, job: Job) -> Response:
        return _json(source.stop(viewer, job))

    @router.post("/api/resume")
    async def resume(viewer: changing, job: Job) -> Response:
        return _json(source.resume(viewer, job))

    @router.post("/api/what-if")
    async def compare_plans(viewer: changing, body: FleetChange) -> Response:
        return _json(await dashboard.planner.compare(source.planner_fleet(viewer), body))


_NAMES = frozenset(
    {
        *("index.html", "style.css", "icon.svg", "uPlot.esm.js", "uPlot.min.css"),
        *("main.js", "dom.js", "fleet.js", "timeline.js", "job.js", "what_if.js"),
    }
)


def _session_facts(source: DashboardSource, session: BrowserSession) -> dict[str, Any]:
    viewer = session.viewer
    return {
        "mode": source.mode,
        "tenant": viewer.tenant,
        "operator": viewer.is_operator,
        "csrf": session.csrf,
    }


def _cookie_name(request: Request) -> str:
    """Contains the port: browsers send a host's cookies to all of its ports."""
    return f"slackwater_{request.url.port or 0}"


def _token(request: Request) -> str:
    return request.cookies.get(_cookie_name(request), "")


def _audience(viewer: Viewer) -> TenantId | None:
    """The group of viewers who see the same figures; None: operators."""
    return None if viewer.is_operator else viewer.tenant


def _refuse_other_sites(request: Request) -> None:
    """`HostCheck` refuses other origins' POSTs; this also keeps their pages from embedding us."""
    if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise ForbiddenError("sec-fetch-site: another site's page may not call the dashboard")


def _json(found: Any) -> Response:
    return _encode_response(msgspec.json.encode(found))


def _encode_response(body: bytes) -> Response:
    headers = HEADERS | {"cache-control": "no-store"}
    return Response(body, media_type="application/json", headers=headers)
