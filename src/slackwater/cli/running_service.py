"""The service that a command talks to, and options that several commands have."""

import functools
import math
import ssl
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slackwater.model.config import flatten
from slackwater.model.errors import (
    ConfigError,
    NotFoundError,
    RefusedError,
    SlackwaterError,
    UnavailableError,
)

if TYPE_CHECKING:
    import subprocess

    import httpx

    from slackwater.runtime.store.state_directory import StateDirectory

State = Annotated[Path, typer.Option(help="Folder of the running service.")]
Url = Annotated[
    str | None,
    typer.Option(envvar="TINKER_BASE_URL", help="URL of the service. Default: that of --state."),
]
Key = Annotated[
    str | None, typer.Option(envvar="TINKER_API_KEY", help="Key that `slackwater up` printed.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved settings and stop.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Change one setting; repeatable.")
]
Trace = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a trace that opens in Perfetto.")
]

KEY_VARIABLE = "TINKER_API_KEY"
OVER = ("finished", "failed", "stopped", "refused")  # stages of jobs that have ended
_ANSWER_S = 10.0


def is_on_command_line(secret: str) -> bool:
    """Whether the secret is on the command line, where other users can read it."""
    return any(secret in part for part in sys.argv[1:])


def read_key(key: str | None, file: Path | None) -> str | None:
    """The key of a long-running process, from the environment or a file; refuses arguments."""
    if key is not None and is_on_command_line(key):
        fix = f"would show the key to every user here; set {KEY_VARIABLE}, or give --key-file"
        raise ConfigError.of("--key", f"{key[:4]}...", fix)
    if file is None:
        return key
    try:
        return file.read_text().strip()
    except OSError as error:
        raise ConfigError.of("--key-file", str(file), f"cannot be read: {error}") from None


def find_service(
    url: str | None, key: str | None, state: Path, *, or_by_url: bool = True
) -> tuple[str, str]:
    """URL and key from the arguments or the state folder; `or_by_url`: the command has --url."""
    if key is not None and is_on_command_line(key):
        print(
            f"slackwater: --key shows the key to every user of this machine; set {KEY_VARIABLE}",
            file=sys.stderr,
        )
    if url is not None and key is not None:
        return url.rstrip("/"), key
    from slackwater.runtime.store.state_directory import StateDirectory

    folder = StateDirectory(state, make=False)
    server = folder.read_server()
    if server is None or not folder.is_locked():
        given = {"--url": url, "--key": key} if or_by_url else {"--state": None}
        missing = " and ".join(name for name, value in given.items() if value is None)
        fix = f"start one with `slackwater up`, or give the {missing} of one"
        raise UnavailableError(describe_absence(folder, fix))
    if url is not None and url.rstrip("/") != server["url"]:
        raise UnavailableError(
            f"--key: is required for {url}; give the key that `slackwater up` printed"
        )
    return str(server["url"]), str(key or server["key"])


def describe_absence(folder: "StateDirectory", fix: str = "") -> str:
    """Why the folder has no service that answers."""
    if (pid := folder.holder()) is not None:
        return f"the service on {folder.root} (pid {pid}) is starting or stopping; try again soon"
    return f"no service is running on {folder.root}{'; ' if fix else ''}{fix}"


def wait_until_serving(
    folder: "StateDirectory", process: "subprocess.Popen[bytes]", within_s: float
) -> dict[str, Any] | None:
    """The facts of a service once its process serves; None if it ends or takes too long."""
    deadline_s = time.monotonic() + within_s
    while process.poll() is None and time.monotonic() < deadline_s:
        server = folder.read_server()
        # A killed service may have left its file.
        if server is not None and server.get("pid") == process.pid:
            return server
        time.sleep(0.05)
    return None


@functools.cache
def _tls(needed: bool) -> ssl.SSLContext:
    """Cached: reading the certificates takes 60 ms, and some commands poll five times a second."""
    import httpx

    return httpx.create_ssl_context() if needed else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class ServiceClient:
    """Sends requests to one service as one tenant; raises its errors as SlackwaterError."""

    def __init__(self, url: str, key: str, timeout_s: float = 30.0) -> None:
        import httpx

        self.url = url
        try:
            self.http = httpx.Client(
                base_url=url,
                headers={"x-api-key": key},
                timeout=timeout_s,
                verify=_tls(url.startswith("https:")),
            )
        except httpx.InvalidURL as error:
            raise UnavailableError(f"{url} does not answer: {error}") from None

    def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> "httpx.Response":
        """The raw response; UnavailableError if the service does not answer."""
        import httpx

        for field, value in flatten(body or {}).items():
            if isinstance(value, float) and not math.isfinite(value):  # no JSON has it
                raise ConfigError.of(field, value, "must be a finite number")
        try:
            return self.http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise UnavailableError(f"{self.url} does not answer: {error}") from None

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object of the response."""
        found: dict[str, Any] = self._succeed(method, path, body).json()
        return found

    def text(self, path: str) -> str:
        return self._succeed("GET", path).text

    def _succeed(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> "httpx.Response":
        answer = self.send(method, path, body)
        if answer.is_success:
            return answer
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        message = str(answer.json()["error"]) if is_json else f"{path}: {answer.text[:500]}"
        kinds = {404: NotFoundError, 422: ConfigError, 429: UnavailableError, 503: UnavailableError}
        raise kinds.get(answer.status_code, RefusedError)(message)


def ask_service(
    state: Path, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Send one request as the operator to the service of a state folder."""
    return ServiceClient(*find_service(None, None, state, or_by_url=False)).ask(method, path, body)


def check_service(url: str, key: str, model: str) -> None:
    """Fail within seconds if the service is down, rejects the key, or lacks the model."""
    try:
        answer = ServiceClient(url, key, _ANSWER_S).send("GET", "/api/v1/get_server_capabilities")
    except UnavailableError as error:
        raise UnavailableError(f"--url: {error}; is `slackwater up` running there?") from None
    if answer.status_code == 401:
        raise ConfigError(
            f"--key: is not known at {url}; give the key that `slackwater up` printed"
        )
    try:
        served = [str(found["model_name"]) for found in answer.json()["supported_models"]]
    except (ValueError, KeyError, TypeError):
        raise UnavailableError(
            f"--url: {url} answers {answer.status_code}, not as a Tinker service does"
        ) from None
    if model not in served:
        raise ConfigError.of(
            "model.base", model, f"is not served at {url}; must be one of: {', '.join(served)}"
        )


def service_problems(url: str, key: str) -> list[str]:
    """The service's problems that the key's tenant may see, or that it is unreachable."""
    try:
        found = ServiceClient(url, key, _ANSWER_S).ask("GET", "/slackwater/status")
    except UnavailableError as error:
        return [str(error)]
    except SlackwaterError:
        return []
    return [str(problem) for problem in found.get("problems", [])]
