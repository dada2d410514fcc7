"""A job's permits over HTTP; standard library only, because it runs in users' programs."""

import http.client
import json
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias
from urllib.parse import quote, urlsplit

from slackwater.model.errors import ConfigError, NotFoundError, RefusedError, UnavailableError

_ANSWER_S = 60.0
_POLL_S = 90.0  # the service answers a poll within half a minute
_GONE_S = 300.0  # a control plane that restarts is back by then
_ERRORS = {404: NotFoundError, 422: ConfigError, 409: RefusedError, 400: ConfigError}


@dataclass(frozen=True, slots=True)
class PhasePermit:
    """The right to run one phase on some nodes. `switch`: another job ran there last."""

    number: int
    phase: str
    nodes: tuple[str, ...] = ()
    switch: bool = False


@dataclass(frozen=True, slots=True)
class JobAsked:
    """A job's request for admission."""

    name: str
    iterations: int
    slo: float = 2.0
    priority: int = 0
    profile: dict[str, float] | None = None

    def body(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


class PermitClient:
    """Keeps one connection per thread, and waits for a service that restarts."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError.of("SLACKWATER_URL", url, "must be like http://HOST:PORT")
        self._url = url.rstrip("/")
        self._parts = parts
        self._headers = {"content-type": "application/json"} | ({"x-api-key": key} if key else {})
        self._own = threading.local()
        self._seen = False

    def submit(self, asked: JobAsked) -> None:
        """Submit the job; RefusedError with the service's reason if it is not admitted."""
        answer = self._call("POST", "/slackwater/jobs", asked.body())
        if not answer.get("admitted", True):
            raise RefusedError(f"job {asked.name}: {answer.get('reason', 'refused')}")

    def ask(self, job: str, phase: str, iteration: int) -> PhasePermit:
        """Wait for the permit, however long; asking again is the same request."""
        while True:
            body = {"phase": phase, "iteration": iteration}
            answer = self._call("POST", f"{_path_of(job)}/permits", body, wait_s=_POLL_S)
            if "permit" in answer:
                nodes = tuple(str(node) for node in answer.get("nodes", ()))
                return PhasePermit(
                    int(answer["permit"]), phase, nodes, bool(answer.get("switch", False))
                )

    def progress(
        self, job: str, permit: PhasePermit, finished: int, total: int, tokens: int
    ) -> bool:
        """Report progress and liveness; False if the permit was revoked."""
        body = {"finished": finished, "total": total, "tokens": tokens}
        answer = self._call("POST", f"{_path_of(job)}/permits/{permit.number}/progress", body)
        return answer.get("state") != "taken"

    def alive(self, job: str) -> None:
        """Send a heartbeat between phases."""
        self._call("POST", f"{_path_of(job)}/alive", {})

    def give_back(self, job: str, permit: PhasePermit, work_s: float) -> None:
        body = {"work_s": max(work_s, 0.0)}
        self._call("DELETE", f"{_path_of(job)}/permits/{permit.number}", body)

    def end(self, job: str, outcome: str, reason: str) -> None:
        self._call("DELETE", _path_of(job), {"outcome": outcome, "reason": reason}, patient=False)

    def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any],
        *,
        wait_s: float = _ANSWER_S,
        patient: bool = True,
    ) -> dict[str, Any]:
        deadline_s, pause_s = time.monotonic() + (_GONE_S if patient else 0.0), 0.1
        while True:
            try:
                status, answer = self._once(method, path, body, wait_s)
                if status != 503:
                    break
                problem = str(answer.get("detail", "not ready"))
            except (OSError, http.client.HTTPException) as error:
                self._close()
                problem = f"{type(error).__name__}: {error}"
            # A service that never answered is not up, or its address is wrong: do not wait for it.
            if time.monotonic() > deadline_s or not self._seen:
                raise UnavailableError(
                    f"SLACKWATER_URL: {self._url} does not answer ({problem}); is `slackwater "
                    "up` running there?"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)
        self._seen = True
        if status >= 400:
            detail = answer.get("detail", answer)
            raise _ERRORS.get(status, RefusedError)(f"{method} {path}: {detail}")
        return answer

    def _once(
        self, method: str, path: str, body: dict[str, Any], wait_s: float
    ) -> tuple[int, dict[str, Any]]:
        connection: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if connection is None:
            kind = (
                http.client.HTTPSConnection
                if self._parts.scheme == "https"
                else http.client.HTTPConnection
            )
            connection = kind(self._parts.hostname or "", self._parts.port, timeout=wait_s)
            self._own.connection = connection
        connection.timeout = wait_s
        if connection.sock is not None:
            connection.sock.settimeout(wait_s)
        text = json.dumps(body)
        connection.request(method, self._parts.path.rstrip("/") + path, text, self._headers)
        response = connection.getresponse()
        data = response.read()
        try:
            answer = json.loads(data) if data else {}
        except ValueError:
            answer = {"detail": data[:200].decode(errors="replace")}
        return response.status, answer if isinstance(answer, dict) else {"detail": answer}

    def _close(self) -> None:
        connection = getattr(self._own, "connection", None)
        if connection is not None:
            connection.close()
            self._own.connection = None


class NoService:
    """Used with SLACKWATER_OFFLINE=1: every phase may run at once."""

    def submit(self, asked: JobAsked) -> None: ...

    def ask(self, job: str, phase: str, iteration: int) -> PhasePermit:
        return PhasePermit(0, phase)

    def progress(
        self, job: str, permit: PhasePermit, finished: int, total: int, tokens: int
    ) -> bool:
        return True

    def alive(self, job: str) -> None: ...

    def give_back(self, job: str, permit: PhasePermit, work_s: float) -> None: ...

    def end(self, job: str, outcome: str, reason: str) -> None: ...


PermitPort: TypeAlias = PermitClient | NoService  # what the decorators need of a service


def _path_of(job: str) -> str:
    return f"/slackwater/jobs/{quote(job, safe='')}"
