"""Docker by its API: a container on an image holds the namespaces that actions enter.

`docker exec` costs a hundred milliseconds and shares the container's limits. So the engine only
creates and removes containers; actions enter them like any held sandbox, with their own cores and
limits. That takes root and a local engine with Docker's API on a Unix socket (Podman's works too).
"""

import http.client
import json
import os
import select
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from slackwater.model.errors import UnavailableError
from slackwater.sandbox import linux
from slackwater.sandbox.backends.port import ALL_GUARANTEES, Backend, Order, variables
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
    """Where the engine listens: as `DOCKER_HOST` says, if it names a Unix socket."""
    return os.environ.get("DOCKER_HOST", "").removeprefix("unix://") or SOCKET


def container_body(image: str, environment: Environment, owner: str) -> dict[str, Any]:
    """The API request for a waiting container with the environment's folders and no rights."""
    body: dict[str, Any] = {
        "Image": image,
        "Entrypoint": ["/bin/cat"],
        "Cmd": [],
        "OpenStdin": True,  # so `cat` waits for as long as the container is wanted
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
        """Whether it answers and has the image."""
        self._ask("GET", "/_ping")
        self._ask("GET", f"{_API}/images/{image}/json", why=f"image {image!r}: pull it first")

    def start(self, body: Mapping[str, Any]) -> tuple[str, int]:
        """A new container's name, and its first process."""
        made = json.loads(self._ask("POST", f"{_API}/containers/create", body))["Id"]
        try:
            self._ask("POST", f"{_API}/containers/{made}/start")
            told = json.loads(self._ask("GET", f"{_API}/containers/{made}/json"))
            return made, int(told["State"]["Pid"])
        except (UnavailableError, ValueError, KeyError):
            self.remove(made)
            raise

    def remove(self, container: str) -> None:
        """Remove a container; a missing one is fine."""
        self._ask("DELETE", f"{_API}/containers/{container}?force=true&v=true", gone_is_fine=True)

    def left_by(self, owner: str) -> list[str]:
        """Containers of a folder's supervisor that was killed."""
        filters = json.dumps({"label": [f"{_LABEL}={owner}"]})
        path = f"{_API}/containers/json?{urlencode({'all': 'true', 'filters': filters})}"
        found = json.loads(self._ask("GET", path))
        return [each["Id"] for each in found]

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        why: str = "",
        gone_is_fine: bool = False,
    ) -> bytes:
        asked = _UnixConnection(self._path)
        try:
            sent = None if body is None else json.dumps(body)
            asked.request(method, path, sent, {"Content-Type": "application/json"})
            answer = asked.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"no engine answers at {self._path}: {error}") from None
        finally:
            asked.close()
        if answer.status >= 400 and not (gone_is_fine and answer.status == 404):
            said = " ".join(content.decode(errors="replace").split())[:300]
            raise UnavailableError(
                f"the engine refuses {method} {path}: {said}{why and f' ({why})'}"
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
    """An environment's container, and the namespaces of its first process."""

    def __init__(self, engine: DockerEngine, body: Mapping[str, Any]) -> None:
        self._engine = engine
        self._name, pid = engine.start(body)
        self._open: dict[int, int] = {}
        self._first = -1
        try:
            self._first = os.pidfd_open(pid)
            for kind in _KINDS:
                self._open[kind] = linux.open_namespace(kind, pid)
        except OSError as error:
            self.close()
            raise UnavailableError(f"a container's namespaces cannot be entered: {error}") from None

    @property
    def is_lost(self) -> bool:
        """Whether it was stopped."""
        return bool(select.select([self._first], [], [], 0)[0])

    def enter(self) -> Mapping[int, int]:
        return self._open

    def close(self) -> None:
        for descriptor in (*self._open.values(), self._first):
            if descriptor >= 0:
                os.close(descriptor)
        self._engine.remove(self._name)


class DockerBackend(Backend):
    """`root` is the environments' folder; containers that a killed supervisor left are removed."""

    name = "docker"
    isolates = True
    guarantees = ALL_GUARANTEES

    def __init__(
        self, engine: DockerEngine, image: str, root: Path, *, networks: Networks | None = None
    ) -> None:
        self._networks = networks or Networks()
        self._engine = engine
        self._image = image
        self._owner = str(root)
        self._containers: dict[str, _Container] = {}
        for container in engine.left_by(self._owner):
            engine.remove(container)

    def opened(self, environment: Environment) -> None:
        body = container_body(self._image, environment, self._owner)
        self._containers[environment.name] = _Container(self._engine, body)

    def launch(self, environment: Environment, order: Order, rlimits: Mapping[int, int]) -> Launch:
        if self._containers[environment.name].is_lost:
            self.closed(environment)
            self.opened(environment)
        limits = order.limits
        network = self._networks.of(environment.name) if limits.network else {}
        return Launch(
            argv=order.argv,
            variables={**variables(order, HOME, "/tmp"), "PATH": _PATH, **order.variables},
            folder=HOME,
            user=environment.user,
            cores=order.cores,
            rlimits={**rlimits, **order.limits.rlimits()},
            own_network=not network,
            enter={**network, **self._containers[environment.name].enter()},
            filtered=True,
        )

    def closed(self, environment: Environment) -> None:
        container = self._containers.pop(environment.name, None)
        if container is not None:
            container.close()
        self._networks.forget(environment.name)

    def close(self) -> None:
        self._networks.close()
