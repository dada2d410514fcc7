"""The SDK's service client, closed reliably."""

import asyncio
import atexit
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import tinker

CLOSE_S = 30.0
_END_S = 5.0


def load_sdk() -> None:
    """Import the SDK without PyTorch, which it loads wherever it is installed: 2 s and 190 MB per
    driver. In this process the SDK then converts no PyTorch tensors.
    """
    if "torch" in sys.modules or "tinker" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` fail
    try:
        import tinker  # noqa: F401
    finally:
        del sys.modules["torch"]


@contextmanager
def closing(
    service: "tinker.ServiceClient", within_s: float = CLOSE_S
) -> "Iterator[tinker.ServiceClient]":
    """Like `with service`, but it always ends.

    Hazard: the SDK waits for its heartbeat to end, and a heartbeat cancelled in the middle of a
    request may miss that. The service knows of the session's end by then.
    """
    status: Literal["success", "errored", "interrupted"] = "interrupted"
    atexit.unregister(end_loop)
    atexit.register(end_loop)
    try:
        yield service
        status = "success"
    except Exception:
        status = "errored"
        raise
    finally:
        with suppress(TimeoutError):
            service.close(status).result(within_s)


def end_loop() -> None:
    """Stop the SDK's event loop thread before the interpreter exits.

    Hazard: a thread at work during finalization may abort the process, and a complete job would
    count as failed. Running requests are cancelled while their loop lives; later each would print a
    traceback.
    """
    module = sys.modules.get("tinker.lib.internal_client_holder")
    holder = getattr(module, "_internal_client_holder_thread_singleton", None)
    loop, thread = getattr(holder, "_loop", None), getattr(holder, "_thread", None)
    if loop is not None and thread is not None and thread.is_alive():
        loop.set_exception_handler(lambda loop, context: None)
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_cancel_requests(), loop).result(_END_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_END_S)


async def _cancel_requests() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_END_S / 2)
