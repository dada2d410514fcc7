"""The dashboard against other sites, other tenants, copied addresses and hostile names."""

import json
import re
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

import httpx
import pytest

from harness.service_plane import with_plane
from slackwater.control.rollout.commands import CompleteTurn
from slackwater.model.ids import JobId, TenantId, TrajectoryId, TurnId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import FinishReason, TurnSpec
from slackwater.runtime.plane import ControlPlane
from slackwater.serve.dashboard.browser_sessions import IDLE_S, LIFE_S, BrowserSessions, Viewer
from slackwater.serve.dashboard.live import LiveSource
from slackwater.serve.dashboard.routes import Dashboard, FigureCache

HOME = "http://test/dashboard"
STATIC = resources.files("slackwater.serve.dashboard") / "static"
HOSTILE = "<img src=x onerror=alert(1)>"


Check = Callable[[ControlPlane, httpx.AsyncClient], Awaitable[None]]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    """One of those that share a control plane, since starting one takes most of the time."""
    CHECKS.append(function)
    return function


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Check, Exception | None]:
    """How each of them went."""
    found: dict[Check, Exception | None] = {}

    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        for one in CHECKS:
            client.cookies.clear()
            try:
                await one(plane, client)
                found[one] = None
            except Exception as error:  # noqa: BLE001 -- raised again in the test of that name
                found[one] = error

    with_plane(tmp_path_factory.mktemp("plane"), work)
    return found


async def logged_in(
    plane: ControlPlane, client: httpx.AsyncClient, tenant: str = "mine"
) -> tuple[httpx.AsyncClient, str]:
    """A browser of the tenant's, and its token for changes."""
    browser = httpx.AsyncClient(transport=client._transport)
    answer = await browser.post(f"{HOME}/api/login", json={"key": plane.tenants.key_of(tenant)})
    assert answer.status_code == 200, answer.text
    return browser, answer.json()["csrf"]


async def own_job(client: httpx.AsyncClient, plane: ControlPlane, tenant: str, name: str) -> None:
    key = {"x-api-key": plane.tenants.key_of(tenant)}
    body = {"name": name, "iterations": 3}
    answer = await client.post("http://test/slackwater/jobs", json=body, headers=key)
    assert answer.status_code == 201, answer.text


def live_source(client: httpx.AsyncClient) -> LiveSource:
    found: LiveSource = client._transport.app.state.dashboard  # type: ignore[attr-defined]
    return found


async def first_figures(dashboard: Dashboard, key: str) -> dict[str, Any]:
    """The first event that a browser with that key gets."""
    viewer = dashboard.source.viewer(key)
    assert viewer is not None
    token, session = dashboard.sessions.begin(viewer)
    event = (await anext(dashboard.stream(token, session))).decode()
    found: dict[str, Any] = json.loads(re.findall(r"data: (.*)", event)[0])
    return found


@check
async def a_login_gives_a_cookie_that_scripts_and_other_sites_cannot_use(
    plane: ControlPlane, client: httpx.AsyncClient
) -> None:
    wrong = await client.post(f"{HOME}/api/login", json={"key": "tml-wrong"})
    assert wrong.status_code == 401 and "set-cookie" not in wrong.headers
    answer = await client.post(f"{HOME}/api/login", json={"key": plane.tenants.key_of("other")})
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and "path=/dashboard" in cookie
    assert plane.tenants.key_of("other") not in answer.text + cookie


@check
async def a_jobs_own_key_opens_nothing(plane: ControlPlane, client: httpx.AsyncClient) -> None:
    key = plane.tenants.job_key(TenantId("mine"), "run")
    answer = await client.post(f"{HOME}/api/login", json={"key": key})
    assert answer.status_code == 401


@check
async def a_copied_address_without_the_cookie_shows_nothing(
    plane: ControlPlane, client: httpx.AsyncClient
) -> None:
    await own_job(client, plane, "mine", "run")
    for path in ("session", "events", "job?job=mine/run", "logs?job=mine/run", "overview",
                 "conversation?job=mine/run&trajectory=t",
                 "timeline?start=0&end=1"):  # fmt: skip
        answer = await client.get(f"{HOME}/api/{path}")  # with an API key, which counts for nothing
        assert answer.status_code == 401, path
    for path in ("stop?job=mine/run", "resume?job=mine/run", "what-if", "logout"):
        answer = await client.post(f"{HOME}/api/{path}", json={})
        assert answer.status_code == 401, path


@check
async def a_logout_ends_the_session_for_whoever_has_its_cookie(
    plane: ControlPlane, client: httpx.AsyncClient
) -> None:
    browser, csrf = await logged_in(plane, client)
    stolen = dict(browser.cookies)
    assert (await browser.get(f"{HOME}/api/session")).status_code == 200
    await browser.post(f"{HOME}/api/logout", headers={"x-csrf-token": csrf})
    thief = httpx.AsyncClient(transport=client._transport, cookies=stolen)
    assert (await thief.get(f"{HOME}/api/session")).status_code == 401


@check
async def other_sites_can_neither_change_nor_read(
    plane: ControlPlane, client: httpx.AsyncClient
) -> None:
    await own_job(client, plane, "mine", "to-stop")
    browser, csrf = await logged_in(plane, client)
    stop = f"{HOME}/api/stop?job=mine/to-stop"
    assert (await browser.post(stop)).status_code == 403  # no token
    assert (await browser.post(stop, headers={"x-csrf-token": "guess"})).status_code == 403
    elsewhere = {"x-csrf-token": csrf, "origin": "http://evil.example"}
    assert (await browser.post(stop, headers=elsewhere)).status_code == 403
    cross = {"x-csrf-token": csrf, "sec-fetch-site": "cross-site"}
    assert (await browser.post(stop, headers=cross)).status_code == 403
    embedded = {"sec-fetch-site": "same-site"}
    assert (await browser.get(f"{HOME}/api/session", headers=embedded)).status_code == 403
    assert (await browser.get(stop)).status_code == 405
    rebound = await browser.get("http://evil.example/dashboard")
    assert rebound.status_code == 421
    own = {"x-csrf-token": csrf, "origin": "http://test", "sec-fetch-site": "same-origin"}
    assert (await browser.post(stop, headers=own)).json()["stage"] == "stopped"


@check
async def a_tenant_sees_and_stops_only_its_own_jobs(
    plane: ControlPlane, client: httpx.AsyncClient
) -> None:
    await own_job(client, plane, "mine", "secret-run")
    await own_job(client, plane, "other", "theirs")
    browser, csrf = await logged_in(plane, client, "other")
    for path in ("job", "logs"):
        answer = await browser.get(f"{HOME}/api/{path}?job=mine/secret-run")
        assert answer.status_code == 404, path
    token = {"x-csrf-token": csrf}
    for path in ("stop", "resume"):
        answer = await browser.post(f"{HOME}/api/{path}?job=mine/secret-run", headers=token)
        assert answer.status_code == 404, path
    assert (await browser.post(f"{HOME}/api/what-if", json={}, headers=token)).is_error
    key = plane.tenants.key_of("other")
    figures = await first_figures(Dashboard(live_source(client)), key)
    assert {row["tenant"] for row in figures["jobs"]} == {"other"}
    assert "secret-run" not in json.dumps(figures)
    assert {"instances", "actions", "serving"}.isdisjoint(figures)


@check
async def a_conversation_is_shown_whole_and_only_to_its_owner(
    plane: ControlPlane, client: httpx.AsyncClient
) -> None:
    await own_job(client, plane, "other", "talks")
    sampling, turn = Sampling(max_tokens=4), TurnId("t/0")
    spec = TurnSpec(
        turn, TrajectoryId("t"), JobId("other/talks"), [5, 6], sampling, "v", base_model="tiny"
    )
    result = CompleteTurn(turn, [7, 8], [-0.1, -2.0], FinishReason.STOP, "v", 0)
    plane.rollout.recent.record_turn(spec, result, 1.0, 3.5)
    browser, _ = await logged_in(plane, client, "other")
    (row,) = (await browser.get(f"{HOME}/api/job?job=other/talks")).json()["trajectories"]
    assert (row["trajectory"], row["took_s"], row["tokens"]) == ("t", 2.5, 2)
    path = f"{HOME}/api/conversation?job=other/talks&trajectory="
    found = (await browser.get(f"{path}t")).json()
    assert found["ids"] == [5, 6, 7, 8] and found["logprobs"] == [None, None, -0.1, -2.0]
    assert found["texts"] is None  # this model has no tokenizer
    assert (await browser.get(f"{path}none")).status_code == 404
    await own_job(client, plane, "mine", "run")
    stranger = f"{HOME}/api/conversation?job=mine/run&trajectory=t"
    assert (await browser.get(stranger)).status_code == 404
    theirs, _ = await logged_in(plane, client, "mine")
    assert (await theirs.get(stranger)).status_code == 404  # the operator's, but not that job's


@check
async def the_operator_sees_everybodys_jobs(plane: ControlPlane, client: httpx.AsyncClient) -> None:
    await own_job(client, plane, "other", "theirs")
    browser, _ = await logged_in(plane, client)
    key = plane.tenants.key_of("mine")
    figures = await first_figures(Dashboard(live_source(client)), key)
    assert {"mine/run", "other/theirs"} <= {row["job"] for row in figures["jobs"]}
    assert (await browser.get(f"{HOME}/api/job?job=other/theirs")).status_code == 200


@check
async def a_timeline_hides_others_spans_from_a_tenant(
    plane: ControlPlane, client: httpx.AsyncClient
) -> None:
    await own_job(client, plane, "mine", "secret-run")
    await own_job(client, plane, "other", "theirs")
    timeline = live_source(client).timeline
    lane = timeline.lane("engine-0", "engines")
    timeline.add(lane, "mine/secret-run", 0, 0.0, 1.0)
    timeline.add(lane, "other/theirs", 0, 1.0, 2.0)
    path = f"{HOME}/api/timeline?start=0&end=10&width=500"
    for tenant, jobs, spans in (("mine", 2, 2), ("other", 1, 1)):
        browser, _ = await logged_in(plane, client, tenant)
        found = (await browser.get(path)).json()
        assert len([job for job in found["jobs"] if job is not None]) == jobs
        assert len(found["rows"][0]["spans"]) == 5 * spans


@check
async def pages_run_no_inline_script_and_load_nothing_from_elsewhere(
    plane: ControlPlane, client: httpx.AsyncClient
) -> None:
    answer = await client.get(HOME)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert not re.findall(r"<script>|\son\w+=|style=|https?://", answer.text)
    linked = re.findall(r'(?:src|href)="([^"]+)"', answer.text)
    assert linked and all(path.startswith("/dashboard/static/") for path in linked)
    for path in linked:
        found = await client.get(f"http://test{path}")
        assert found.status_code == 200 and "content-security-policy" in found.headers
        again = {"if-none-match": found.headers["etag"]}
        assert (await client.get(f"http://test{path}", headers=again)).status_code == 304
    for path in ("../live.py", "..%2flive.py", "uPlot.LICENSE", "none.js"):
        assert (await client.get(f"{HOME}/static/{path}")).status_code == 404


def test_scripts_never_make_markup_of_text() -> None:
    """A job's name with a script in it is a text node: nothing in our modules parses HTML."""
    for file in STATIC.iterdir():
        if file.name.endswith(".js") and not file.name.startswith("uPlot"):
            code = file.read_text()
            found = re.findall(
                r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|srcdoc",
                code,
            )
            assert found == [], file.name
            assert not re.findall(r"https?://", code), file.name


@check
async def a_script_in_a_jobs_name_is_refused_or_only_data(
    plane: ControlPlane, client: httpx.AsyncClient
) -> None:
    body = {"name": HOSTILE, "iterations": 3}
    answer = await client.post("http://test/slackwater/jobs", json=body)
    assert answer.status_code == 422
    browser, _ = await logged_in(plane, client)
    answer = await browser.get(f"{HOME}/api/job", params={"job": HOSTILE})
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/json"


@check
async def figures_are_made_once_for_all_viewers(
    plane: ControlPlane, client: httpx.AsyncClient
) -> None:
    source, made = live_source(client), []
    snapshot = source.snapshot

    def counted(viewer: Viewer) -> Any:
        made.append(viewer.tenant)
        return snapshot(viewer)

    source.snapshot = counted  # type: ignore[method-assign]
    cache = FigureCache(every_s=1000.0)
    dashboard = Dashboard(source)
    dashboard.figures = cache
    for tenant in ("mine", "mine", "other", "mine", "other"):
        await first_figures(dashboard, plane.tenants.key_of(tenant))
    assert made == ["mine", "other"]


def test_sessions_expire_when_idle_and_at_the_latest_after_half_a_day() -> None:
    now_s = 0.0
    sessions = BrowserSessions(lambda: now_s)
    token, _ = sessions.begin(Viewer(TenantId("mine"), True))
    while now_s < LIFE_S:
        assert sessions.find(token) is not None
        now_s += 0.9 * IDLE_S
    assert sessions.find(token) is None
    token, _ = sessions.begin(Viewer(TenantId("mine"), True))
    now_s += 1.1 * IDLE_S
    assert sessions.find(token) is None


@pytest.mark.parametrize("one", CHECKS, ids=lambda one: one.__name__)
def test_of_the_dashboard(one: Check, outcomes: dict[Check, Exception | None]) -> None:
    if (error := outcomes[one]) is not None:
        raise error
