"""Browser sessions: a login with a key starts one, and a cookie identifies it until it expires."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from slackwater.model.ids import TenantId

IDLE_S = 3600.0
LIFE_S = 12 * 3600.0
_MAX_SESSIONS = 1000


@dataclass(frozen=True, slots=True)
class Viewer:
    """A logged-in tenant; the operator sees all tenants' jobs."""

    tenant: TenantId
    is_operator: bool


@dataclass(slots=True)
class BrowserSession:
    """One login. `csrf` must come with every request that changes something."""

    viewer: Viewer
    csrf: str
    began_s: float
    used_s: float


class BrowserSessions:
    """Sessions are kept here, so that a logout invalidates every copy of the cookie."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sessions: dict[str, BrowserSession] = {}

    def begin(self, viewer: Viewer) -> tuple[str, BrowserSession]:
        """A new session and its cookie's value."""
        now_s = self._clock()
        for token in [token for token in self._sessions if self.find(token, uses=False) is None]:
            del self._sessions[token]
        while len(self._sessions) >= _MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        token = secrets.token_urlsafe(32)
        session = BrowserSession(viewer, secrets.token_urlsafe(24), now_s, now_s)
        self._sessions[token] = session
        return token, session

    def find(self, token: str, *, uses: bool = True) -> BrowserSession | None:
        """The session of a cookie, unless it has expired."""
        session, now_s = self._sessions.get(token), self._clock()
        if session is None or now_s > min(session.used_s + IDLE_S, session.began_s + LIFE_S):
            return None
        if uses:
            session.used_s = now_s
        return session

    def end(self, token: str) -> None:
        self._sessions.pop(token, None)
