"""What all tests share."""

import signal


def pytest_configure() -> None:
    """A suite that a shell runs in the background ignores Ctrl-C, and so would every program that it starts and interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
