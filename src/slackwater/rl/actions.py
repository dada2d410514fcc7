"""A small client of the action service, for environments and rewards.

    async with ActionClient(url, key, job="my-run") as actions:
        async with actions.environment(files={"main.py": "print(42)"}) as place:
            result = await place.run("python3", "main.py", cores=[1, 2, 4])

Every action has a unique name, so that a retry after a lost connection never runs it twice. Full
queues (429) and restarts are retried within `patience_s`.
"""

import asyncio
import contextlib
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from slackwater.model.errors import ConfigError, NotFoundError, RefusedError, UnavailableError
from slackwater.rl.service_calls import CallError, ServiceCalls, ServiceReply

_HOLD_S = 20.0
_MOST_CONNECTIONS = 1024
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ActionOutcome:
    """How an action ended. `outcome` is done, failed, timed_out, cancelled, lost or refused."""

    action: str
    outcome: str
    reason: str
    status: int | None
    stdout: str
    stderr: str
    queued_s: float
    ran_s: float
    cores: int
    usage: Mapping[str, float]

    @property
    def ok(self) -> bool:
        """It ended normally with status 0."""
        return self.outcome == "done" and self.status == 0


@dataclass(frozen=True, slots=True)
class RewardScore:
    """A reward model's score of a text: the mean of `logprobs`."""

    score: float
    logprobs: Sequence[float]


class ActionClient:
    """One service, one job. Use it from one event loop."""

    def __init__(
        self, url: str, key: str, *, job: str = "default", patience_s: float = 120.0
    ) -> None:
        self._job = job
        self._patience_s = patience_s
        self._calls = ServiceCalls(
            url, key, silent_s=_HOLD_S + 20, most_connections=_MOST_CONNECTIONS
        )

    async def __aenter__(self) -> "ActionClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._calls.close()

    async def run(
        self, *command: str, environment: str | None = None, **given: Any
    ) -> ActionOutcome:
        """Run one action to its end; `given` are API fields such as cores, limit_s, stdin, limits.

        Cancelling this task cancels the action.
        """
        name = secrets.token_hex(12)
        body = {"command": list(command), "action": name, "job": self._job, "wait_s": _HOLD_S}
        if environment is not None:
            body["environment"] = environment
        try:
            answer = await self._ask("POST", "/slackwater/actions", body | given)
            while answer.status == 202:
                path = f"/slackwater/actions/{answer.said['action']}"
                answer = await self._ask("GET", f"{path}?wait_s={_HOLD_S:g}")
        except asyncio.CancelledError:
            with contextlib.suppress(CallError):
                await asyncio.shield(self._calls.ask("POST", f"/slackwater/actions/{name}/cancel"))
            raise
        return _result(answer.said)

    async def score(self, service: str, tokens: Sequence[int], **given: Any) -> "RewardScore":
        """Log-probs of a text's tokens but the first under a reward service, and their mean."""
        result = await self.run(service=service, tokens=list(tokens), **given)
        if not result.ok:
            raise UnavailableError(f"service {service}: {result.outcome}: {result.reason}")
        return RewardScore(**json.loads(result.stdout))

    @contextlib.asynccontextmanager
    async def environment(self, **given: Any) -> "AsyncIterator[ActionEnvironment]":
        """An environment inside the block; API fields: files, snapshot, memory_mib."""
        name = await self.open(**given)
        try:
            yield ActionEnvironment(self, name)
        finally:
            await self.close(name)

    async def open(self, **given: Any) -> str:
        """An environment that stays until it is closed; its name."""
        body = {"environment": secrets.token_hex(12), "job": self._job, "wait_s": _HOLD_S} | given
        answer = await self._ask("POST", "/slackwater/environments", body)
        return str(answer.said["environment"])

    async def close(self, environment: str) -> None:
        """Close it; a missing one is fine."""
        with contextlib.suppress(NotFoundError):
            await self._ask("DELETE", f"/slackwater/environments/{environment}")

    async def snapshot(self, environment: str, name: str) -> None:
        """Snapshot it, for others to start from."""
        path = f"/slackwater/environments/{environment}/snapshot"
        await self._ask("POST", path, {"snapshot": name})

    @contextlib.asynccontextmanager
    async def permit(self, **uses: int) -> AsyncIterator[None]:
        """Hold this much of some limits inside the block, for example a quota of an API."""
        body = {"action": secrets.token_hex(12), "job": self._job, "uses": uses}
        asked = (await self._ask("POST", "/slackwater/actions", body)).said["action"]
        path = f"/slackwater/actions/{asked}"
        while not (await self._ask("POST", f"{path}/held?wait_s={_HOLD_S:g}", {})).said["held"]:
            pass
        began_s = time.monotonic()
        try:
            yield
        finally:
            await self._ask("POST", f"{path}/done", {"ran_s": time.monotonic() - began_s})

    async def _ask(self, method: str, path: str, body: object = None) -> ServiceReply:
        """Ask until there is an answer that is not "later"."""
        deadline_s = time.monotonic() + self._patience_s
        pause_s = 0.05
        while True:
            try:
                answer = await self._calls.ask(method, path, body)
                if answer.status not in (429, 503):
                    return _checked(answer)
                why = str(answer.said)
            except CallError as error:
                why = str(error)
            if time.monotonic() + pause_s > deadline_s:
                raise UnavailableError(f"{path}: no answer within {self._patience_s:g} s: {why}")
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class ActionEnvironment:
    """An environment: what runs in it finds what ran before."""

    client: ActionClient
    name: str

    async def run(self, *command: str, **given: Any) -> ActionOutcome:
        return await self.client.run(*command, environment=self.name, **given)

    async def snapshot(self, name: str) -> None:
        await self.client.snapshot(self.name, name)


def _checked(answer: ServiceReply) -> ServiceReply:
    if answer.status < 400:
        return answer
    found = answer.said.get("error") if isinstance(answer.said, dict) else None
    said = str(answer.said if found is None else found)
    if answer.status == 404:
        raise NotFoundError(said)
    if answer.status == 422:
        raise ConfigError(said)
    raise RefusedError(said)


def _result(said: dict[str, Any]) -> ActionOutcome:
    usage = said["usage"]
    return ActionOutcome(
        action=said["action"],
        outcome=said["outcome"],
        reason=said["reason"],
        status=said["status"],
        stdout=said["stdout"],
        stderr=said["stderr"],
        queued_s=usage["queued_s"],
        ran_s=usage["ran_s"],
        cores=usage["cores"],
        usage=usage,
    )


class ActionThread:
    """`with ActionThread(url, key) as actions: actions.do(lambda c: c.run("true")).result()`"""

    def __init__(self, url: str, key: str, *, job: str = "default") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="actions", daemon=True)
        self._client = ActionClient(url, key, job=job)

    def __enter__(self) -> "ActionThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel running work and stop the thread."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _close(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.__aexit__(None, None, None)

    def do(self, work: Callable[[ActionClient], Coroutine[Any, Any, T]]) -> "Future[T]":
        """Run a coroutine with the client; returns a future."""
        return asyncio.run_coroutine_threadsafe(work(self._client), self._loop)
