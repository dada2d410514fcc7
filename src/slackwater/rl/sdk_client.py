"""The SDK's client of a service, for a block whose end nothing holds up."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import tinker

CLOSE_S = 30.0


@contextmanager
def closing(
    service: "tinker.ServiceClient", within_s: float = CLOSE_S
) -> "Iterator[tinker.ServiceClient]":
    """What `with service` does, but not for ever.

    The SDK's own way out waits until its heartbeat has ended, and a heartbeat that is cancelled in the middle of a request may
    miss that and beat on. The service has been told of the session's end by then.
    """
    status: Literal["success", "errored", "interrupted"] = "interrupted"
    try:
        yield service
        status = "success"
    except Exception:
        status = "errored"
        raise
    finally:
        with suppress(TimeoutError):
            service.close(status).result(within_s)
