"""Docker through its API: a container of an image keeps the namespaces that actions enter.

`docker exec` costs a hundred milliseconds and shares the container's limits. So the engine only
creates and removes containers; actions enter their namespaces with their own cores and limits. That
takes root and a local engine with Docker's API on a Unix socket (Podman's works too).
"""

import http.client
import json
import os
import select
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from slackwater.model.errors import UnavailableError
from slackwater.sandbox import linux
from slackwater.sandbox.backends.port import ALL_GUARANTEES, Backend, Order, launch_as_user
from slackwater.sandbox.environment import Environment
from slackwater.sandbox.launch import Launch
from slackwater.sandbox.networks import Networks

HOME = "/sandbox"
SOCKET = "/var/run/docker.sock"
DEFAULT_IMAGE = "python:3.11-slim"
_LABEL = "slackwater.folder"
_API = "/v1.40"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ANSWER_WITHIN_S = 60.0
_KINDS = (linux.CLONE_NEWPID, linux.CLONE_NEWUTS, linux.CLONE_NEWNS)


def socket_path() -> str:
    """The engine's socket: `DOCKER_HOST`, or the default path."""
    return os.environ.get("DOCKER_HOST", "").removeprefix("unix://") or SOCKET


def container_body(image: str, environment: Environment, owner: str) -> dict[str, Any]:
    """The API request for an idle container with the environment's folders and no privileges."""
    body: dict[str, Any] = {
        "Image": image,
        "Entrypoint": ["/bin/cat"],
        "Cmd": [],
        "OpenStdin": True,  # so `cat` waits for the life of the container
        "WorkingDir": HOME,
        "Labels": {_LABEL: owner},
        "HostConfig": {
            "Binds": [f"{environment.view}:{HOME}", f"{environment.tmp}:/tmp"],
            "NetworkMode": "none",
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
        },
    }
    if environment.user is not None:
        body["User"] = f"{environment.user}:{environment.user}"
    return body


class DockerEngine:
    """The engine at a Unix socket; UnavailableError has a one-line reason."""

    def __init__(self, path: str) -> None:
        self._path = path

    def check(self, image: str) -> None:
        """Raise UnavailableError unless it answers and has the image."""
        self._request("GET", "/_ping")
        self._request("GET", f"{_API}/images/{image}/json", why=f"image {image!r}: pull it first")

    def start(self, body: Mapping[str, Any]) -> tuple[str, int]:
        """A new container's name, and the pid of its first process."""
        container = json.loads(self._request("POST", f"{_API}/containers/create", body))["Id"]
        try:
            self._request("POST", f"{_API}/containers/{container}/start")
            state = json.loads(self._request("GET", f"{_API}/containers/{container}/json"))
            return container, int(state["State"]["Pid"])
        except (UnavailableError, ValueError, KeyError):
            self.remove(container)
            raise

    def remove(self, container: str) -> None:
        """Remove a container; a missing one is fine."""
        self._request("DELETE", f"{_API}/containers/{container}?force=true&v=true", missing_ok=True)

    def find_leftovers(self, owner: str) -> list[str]:
        """Containers that a killed supervisor of this folder left behind."""
        filters = json.dumps({"label": [f"{_LABEL}={owner}"]})
        path = f"{_API}/containers/json?{urlencode({'all': 'true', 'filters': filters})}"
        containers = json.loads(self._request("GET", path))
        return [each["Id"] for each in containers]

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        why: str = "",
        missing_ok: bool = False,
    ) -> bytes:
        connection = _UnixConnection(self._path)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"no engine answers at {self._path}: {error}") from None
        finally:
            connection.close()
        if response.status >= 400 and not (missing_ok and response.status == 404):
            detail = " ".join(content.decode(errors="replace").split())[:300]
            raise UnavailableError(
                f"the engine refuses {method} {path}: {detail}{why and f' ({why})'}"
            )
        return content


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("docker", timeout=_ANSWER_WITHIN_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_ANSWER_WITHIN_S)
        self.sock.connect(self._path)


def find_docker(image: str) -> tuple[DockerEngine | None, str]:
    """The engine of this machine with the image, or None and why not."""
    path = socket_path()
    if not Path(path).is_socket():
        return None, f"no engine: {path} is not there"
    engine = DockerEngine(path)
    try:
        engine.check(image)
    except UnavailableError as error:
        return None, str(error)
    return engine, f"the engine at {path} has image {image}"


class _Container:
    """An environment's container, and the `namespaces` of its first process by kind."""

    def __init__(self, engine: DockerEngine, body: Mapping[str, Any]) -> None:
        self._engine = engine
        self._name, pid = engine.start(body)
        self.namespaces: dict[int, int] = {}
        self._pidfd = -1
        try:
            self._pidfd = os.pidfd_open(pid)
            for kind in _KINDS:
                self.namespaces[kind] = linux.open_namespace(kind, pid)
        except OSError as error:
            self.close()
            raise UnavailableError(f"a container's namespaces cannot be entered: {error}") from None

    @property
    def is_lost(self) -> bool:
        """Whether it was stopped."""
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def close(self) -> None:
        for descriptor in (*self.namespaces.values(), self._pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        self._engine.remove(self._name)


class DockerBackend(Backend):
    """`root` is the environments' folder; removes containers that a killed supervisor left."""

    name = "docker"
    isolates = True
    guarantees = ALL_GUARANTEES

    def __init__(self, engine: DockerEngine, image: str, root: Path, networks: Networks) -> None:
        self._networks = networks
        self._engine = engine
        self._image = image
        self._owner = str(root)
        self._containers: dict[str, _Container] = {}
        for container in engine.find_leftovers(self._owner):
            engine.remove(container)

    def open_environment(self, environment: Environment) -> None:
        body = container_body(self._image, environment, self._owner)
        self._containers[environment.name] = _Container(self._engine, body)

    def launch(self, environment: Environment, order: Order, rlimits: Mapping[int, int]) -> Launch:
        if self._containers[environment.name].is_lost:
            self.close_environment(environment)
            self.open_environment(environment)
        network = self._networks.namespaces_for(environment.name) if order.limits.network else {}
        launch = launch_as_user(environment, order, rlimits, HOME, "/tmp")
        return replace(
            launch,
            variables={**launch.variables, "PATH": _PATH, **order.variables},
            own_network=not network,
            enter={**network, **self._containers[environment.name].namespaces},
            filtered=True,
        )

    def close_environment(self, environment: Environment) -> None:
        container = self._containers.pop(environment.name, None)
        if container is not None:
            container.close()
        self._networks.remove(environment.name)

    def close(self) -> None:
        self._networks.close()
