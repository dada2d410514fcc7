"""Lengths of sleep by which a test knows its own processes among all of a machine."""

import secrets


def sleep_marker() -> int:
    """Seconds for `sleep`, so many that they never pass, and that no other test sleeps for."""
    return secrets.randbelow(9 * 10**8) + 10**8
