"""Which service a command talks to: the one that was named, else the one that runs on the state folder."""

from pathlib import Path
from typing import Any

from slackwater.model.errors import ConfigError, NotFoundError, RefusedError, UnavailableError

_ANSWER_S = 10.0


def find_service(url: str | None, key: str | None, state: Path) -> tuple[str, str]:
    """URL and key. What was given holds; what was not is read from the folder of a running service."""
    if url is not None and key is not None:
        return url.rstrip("/"), key
    from slackwater.runtime.store.state_directory import StateDirectory

    folder = StateDirectory(state)
    server = folder.read_server()
    if server is None or not folder.is_locked():
        missing = "--url" if url is None else "--key"
        raise UnavailableError(
            f"no service is running on {folder.root}: start one with `slackwater up`, "
            f"or name one ({missing} is missing)"
        )
    if url is not None and url.rstrip("/") != server["url"]:
        raise UnavailableError(f"--key is needed for {url}: give what `slackwater up` printed")
    return str(server["url"]), str(key or server["key"])


def ask_service(
    state: Path, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One request of the operator to the service that runs on the state folder."""
    import httpx

    url, key = find_service(None, None, state)
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
    """Raise within seconds if nobody answers there, the key is not known, or the model is not served."""
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
