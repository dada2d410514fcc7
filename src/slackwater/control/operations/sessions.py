"""Live sessions: from their creation until their client ends them or heartbeats stop."""

from dataclasses import dataclass, field

from slackwater.model.ids import SessionId


@dataclass(slots=True)
class SessionTracker:
    """Tracks sessions' last signs of life; it reads no clock."""

    silent_after_s: float = 300.0
    _seen_s: dict[SessionId, float] = field(default_factory=dict)

    def touch(self, session: SessionId, now_s: float) -> None:
        """Record the opening of a session or a sign of life."""
        self._seen_s[session] = max(now_s, self._seen_s.get(session, now_s))

    def end(self, session: SessionId) -> None:
        self._seen_s.pop(session, None)

    def is_alive(self, session: SessionId) -> bool:
        return session in self._seen_s

    def reap(self, now_s: float) -> list[SessionId]:
        """Remove and return the sessions that have been silent for too long."""
        silent = sorted(
            session
            for session, seen_s in self._seen_s.items()
            if now_s - seen_s >= self.silent_after_s
        )
        for session in silent:
            del self._seen_s[session]
        return silent
