"""All errors that users see.

    SlackwaterError
    ├── ConfigError       a file, flag or request field is wrong      (ValueError)
    ├── RefusedError      well formed, but cannot be done here        (RuntimeError)
    ├── NotFoundError     no such job, session, model or instance     (LookupError)
    └── UnavailableError  transient: the same call may work later     (ConnectionError)

A message says what was wrong, the value seen, and what to write instead.
"""

import errno

# errno of a full or unusable disk: no retry helps until a person acts.
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)


class SlackwaterError(Exception):
    """Base of all errors that users see, as one line."""


class ConfigError(SlackwaterError, ValueError):
    """A field has a value that cannot be used."""

    @classmethod
    def of(cls, field: str, value: object, fix: str) -> "ConfigError":
        """Name the field, the value seen (unless it is None, for a missing one) and the fix."""
        return cls(f"{field}: {fix}" if value is None else f"{field}: {_show(value)} {fix}")


def _show(value: object) -> str:
    """The value as Python writes it; of a long one its beginning."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:120]}... ({len(text):,} characters)"


def check_above_zero(where: str, record: object, *fields: str) -> None:
    for field in fields:
        if not getattr(record, field) > 0:
            raise ConfigError.of(f"{where}{field}", getattr(record, field), "must be above 0")


def check_not_negative(where: str, record: object, *fields: str) -> None:
    for field in fields:
        if not getattr(record, field) >= 0:
            raise ConfigError.of(f"{where}{field}", getattr(record, field), "must not be negative")


class RefusedError(SlackwaterError, RuntimeError):
    """The request is well formed, but this fleet or service cannot do it."""


class NotFoundError(SlackwaterError, LookupError):
    """The id names nothing, or nothing that this caller may see."""


class UnavailableError(SlackwaterError, ConnectionError):
    """A peer or resource is unavailable for now; a retry may work."""


def describe(error: Exception) -> str:
    """The error's message, with its type unless it is one of these."""
    return str(error) if isinstance(error, SlackwaterError) else f"{type(error).__name__}: {error}"
