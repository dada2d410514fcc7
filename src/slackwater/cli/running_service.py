"""Finds the service that a command talks to: the named one, or the state folder's."""

import sys
from pathlib import Path
from typing import Any

from slackwater.model.errors import ConfigError, NotFoundError, RefusedError, UnavailableError

KEY_VARIABLE = "TINKER_API_KEY"
_ANSWER_S = 10.0


def is_on_command_line(secret: str) -> bool:
    """Whether everybody on this machine can read it."""
    return any(secret in part for part in sys.argv[1:])


def read_key(key: str | None, file: Path | None) -> str | None:
    """The key of a long-running process: from the environment or a file, never its arguments."""
    if key is not None and is_on_command_line(key):
        fix = f"would show the key to everybody here; set {KEY_VARIABLE}, or give --key-file"
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
    """URL and key, from the arguments or the state folder; `or_by_url` if there is a --url."""
    if key is not None and is_on_command_line(key):
        print(
            f"slackwater: --key shows the key to everybody on this machine; set {KEY_VARIABLE}",
            file=sys.stderr,
        )
    if url is not None and key is not None:
        return url.rstrip("/"), key
    from slackwater.runtime.store.state_directory import StateDirectory

    folder = StateDirectory(state)
    server = folder.read_server()
    if server is None or not folder.is_locked():
        missing = "--url" if url is None else "--key"
        other = f"name one ({missing} is missing)" if or_by_url else "give the --state of one"
        raise UnavailableError(
            f"no service is running on {folder.root}: start one with `slackwater up`, or {other}"
        )
    if url is not None and url.rstrip("/") != server["url"]:
        raise UnavailableError(f"--key is needed for {url}: give what `slackwater up` printed")
    return str(server["url"]), str(key or server["key"])


def ask_service(
    state: Path, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One request of the operator to the service that runs on the state folder."""
    import httpx

    url, key = find_service(None, None, state, or_by_url=False)
    try:
        answer = httpx.request(
            method, f"{url}{path}", json=body, headers={"x-api-key": key}, timeout=30
        )
    except httpx.HTTPError as error:
        raise UnavailableError(f"{url} does not answer: {error}") from None
    said: dict[str, Any] = answer.json()
    if answer.is_error:
        kinds = {404: NotFoundError, 422: ConfigError}
        raise kinds.get(answer.status_code, RefusedError)(said["detail"])
    return said


def check_service(url: str, key: str, model: str) -> None:
    """Fail within seconds if the service is away, rejects the key, or lacks the model."""
    import httpx

    try:
        answer = httpx.get(
            f"{url}/api/v1/get_server_capabilities", headers={"x-api-key": key}, timeout=_ANSWER_S
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UnavailableError(
            f"--url: {url} does not answer ({error}); is `slackwater up` running there?"
        ) from None
    if answer.status_code == 401:
        raise ConfigError(f"--key: it is not known at {url}; give the one `slackwater up` printed")
    try:
        served = [str(found["model_name"]) for found in answer.json()["supported_models"]]
    except (ValueError, KeyError, TypeError):
        raise UnavailableError(
            f"--url: {url} answers {answer.status_code}, not as a Tinker service does"
        ) from None
    if model not in served:
        raise ConfigError.of(
            "model.base", model, f"is not served at {url}; there are: {', '.join(served)}"
        )


def service_problems(url: str, key: str) -> list[str]:
    """The service's problems as the key's tenant may see them, or that it is unreachable."""
    import httpx

    try:
        answer = httpx.get(
            f"{url}/slackwater/status", headers={"x-api-key": key}, timeout=_ANSWER_S
        )
        found = answer.json().get("problems", []) if answer.is_success else []
    except (httpx.HTTPError, ValueError) as error:
        return [f"{url} does not answer ({type(error).__name__})"]
    return [str(problem) for problem in found]
