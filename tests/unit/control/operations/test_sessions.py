"""Sessions live as long as their heartbeats."""

from slackwater.control.operations.sessions import SessionTracker
from slackwater.model.ids import SessionId


def test_a_session_goes_when_its_heartbeats_have_stopped_and_not_before() -> None:
    book, session = SessionTracker(silent_after_s=300), SessionId("s")
    book.touch(session, 0.0)
    assert book.reap(299.0) == []
    book.touch(session, 299.0)
    assert book.reap(598.0) == []
    assert book.reap(599.0) == [session]
    assert not book.is_alive(session)
