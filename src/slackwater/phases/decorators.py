"""`@slackwater.phase` and `@slackwater.runtime_hook`: run a phase under a permit.

A phase waits for its permit, makes its state resident, runs, offloads, and returns the permit.
Between phases the process keeps everything else: communicators, environments, compiled code. The
decorators take functions, coroutines and (async) generators; `with slackwater.phase("train"):` does
the same for a block.
"""

import asyncio
import contextlib
import functools
import inspect
import os
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from slackwater.model.errors import ConfigError, SlackwaterError
from slackwater.phases.job import PHASES, HeldPhase, Job, current_job, inside

F = TypeVar("F", bound=Callable[..., Any])
State = Callable[..., Any] | Iterable[Any] | None


class phase:  # noqa: N801  (it is used as a decorator)
    """One phase of the job's cycle, as a decorator or a context.

    `state`: what must be on the device meanwhile (modules, optimizers, tensors), or a function of
    the call's arguments that returns it. `cores`: pin the calling thread. `iteration`: the step's
    number, if calls are not one per step.
    """

    def __init__(
        self,
        name: str,
        *,
        state: State = None,
        cores: Iterable[int] | None = None,
        iteration: int | None = None,
    ) -> None:
        if name not in PHASES:
            raise ConfigError.of("phase", name, f"must be one of {', '.join(PHASES)}")
        self._name = name
        self._state = list(state) if isinstance(state, Iterator) else state
        self._cores = None if cores is None else frozenset(cores)
        self._iteration = iteration
        self._open: list[contextlib.ExitStack] = []

    def __call__(self, function: F) -> F:
        if inspect.isasyncgenfunction(function):
            wrapped: Any = self._async_generator(function)
        elif inspect.iscoroutinefunction(function):
            wrapped = self._coroutine(function)
        elif inspect.isgeneratorfunction(function):
            wrapped = self._generator(function)
        else:
            wrapped = self._plain(function)
        return cast(F, functools.wraps(function)(wrapped))  # it is called as `function` is

    def __enter__(self) -> Job:
        job = current_job()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._run(job, (), {}))
            stack.enter_context(_on_cores(self._cores))
            self._open.append(stack.pop_all())
        return job

    def __exit__(self, *raised: Any) -> None:
        self._open.pop().__exit__(*raised)

    @contextlib.contextmanager
    def _run(self, job: Job, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """The permit outside, the state inside: without a permit nothing moves."""
        held = job.enter(self._name, self._iteration)
        try:
            if self._state is not None:
                from slackwater.phases.residency import residency  # tensors, only when needed

                # Before it wakes: the last leave offloads everything that was woken.
                held.states.append(self._resolve_state(args, kwargs))
                residency().wake(held.states[-1])
            yield
        finally:
            job.leave(held, _offload)

    def _resolve_state(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The state of this call. A module is callable, and is a state itself."""
        made: Any = self._state
        if callable(made) and not hasattr(made, "parameters"):
            made = made(*args, **kwargs)
        things = list(made) if isinstance(made, (list, tuple, Iterator)) else [made]
        return [list(thing) if isinstance(thing, Iterator) else thing for thing in things]

    def _plain(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._run(current_job(), args, kwargs), _on_cores(self._cores):
                return function(*args, **kwargs)

        return call

    def _generator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with self._run(current_job(), args, kwargs), _on_cores(self._cores):
                return (yield from function(*args, **kwargs))

        return call

    def _coroutine(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            async with _running_in_thread(self, args, kwargs):
                with _on_cores(self._cores):
                    return await function(*args, **kwargs)

        return call

    def _async_generator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            async with _running_in_thread(self, args, kwargs):
                with _on_cores(self._cores):
                    async for item in function(*args, **kwargs):
                        yield item

        return call


@contextlib.asynccontextmanager
async def _running_in_thread(
    made: phase, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> AsyncGenerator[None, None]:
    """Enter and leave in one thread, so that the loop continues while the permit is awaited."""
    loop, job = asyncio.get_running_loop(), current_job()
    if inside.get() is not None and inside.get() is job.held:  # nothing to wait for
        with made._run(job, args, kwargs):
            yield
        return
    pool = ThreadPoolExecutor(1, "phase")
    running = made._run(job, args, kwargs)
    entering = loop.run_in_executor(pool, running.__enter__)
    try:
        await asyncio.shield(entering)
    except asyncio.CancelledError:
        # The permit may still come: it is returned at once.
        pool.submit(_leave_if_entered, running)
        pool.shutdown(wait=False)
        raise
    inside.set(job.held)
    failed: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failed = error
        raise
    finally:
        inside.set(None)
        leaving = loop.run_in_executor(pool, _leave_after, running, failed)
        pool.shutdown(wait=False)
        await asyncio.shield(leaving)


def _offload(held: HeldPhase) -> None:
    if held.states:
        from slackwater.phases.residency import residency

        residency().sleep(held.states)


def _leave_if_entered(running: Any) -> None:
    """Leave a phase whose entering was cancelled; runs on the phase's thread, after it ended."""
    with contextlib.suppress(SlackwaterError, StopIteration, RuntimeError):
        running.__exit__(None, None, None)


def _leave_after(running: Any, failed: BaseException | None) -> None:
    """Leave the phase of a body that may have failed; its error propagates."""
    if failed is None:
        running.__exit__(None, None, None)
        return
    with contextlib.suppress(type(failed)):
        running.__exit__(type(failed), failed, failed.__traceback__)


@contextlib.contextmanager
def _on_cores(cores: frozenset[int] | None) -> Iterator[None]:
    if cores is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def runtime_hook(function: F) -> F:
    """Report what the function returns as the phase's progress, and return it.

    It may return the number of finished responses, (finished, total), (finished, total, tokens), or
    a mapping with those names; None reports nothing.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        counts = _counts(function, found)
        if counts is not None:
            current_job().report(*counts)
        return found

    return cast(F, call)  # it is called as `function` is


def _counts(function: Callable[..., Any], found: object) -> tuple[int, int, int] | None:
    if found is None:
        return None
    if isinstance(found, Mapping):
        values = [found.get(name, 0) for name in ("finished", "total", "tokens")]
    elif isinstance(found, tuple) and len(found) <= 3:
        values = [*found, 0, 0][:3]
    else:
        values = [found, 0, 0]
    try:
        finished, total, tokens = (max(int(value), 0) for value in values)
    except (TypeError, ValueError):
        name = getattr(function, "__name__", "runtime_hook")
        raise ConfigError.of(
            f"runtime_hook {name}", found, "must be finished, (finished, total) or (.., tokens)"
        ) from None
    return finished, total, tokens
