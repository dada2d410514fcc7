"""Pools whose nodes Kubernetes starts: manifests of an Indexed Job and a Secret per pool.

A pod is a node. Its termination grace is the eviction notice, and the Job's controller replaces it
under the same index, which joins again under the same name. The Secret holds the join tokens; each
pod sees its own as a file.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slackwater.model.errors import ConfigError

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")
_TOKEN = "/var/run/slackwater/token"
_SPARE_S = 15  # the agent ends its workers after the notice
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
HTTP_PORT = 8123

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KubernetesPool:
    """The nodes of one pool that Kubernetes starts; `queue` is a local queue of Kueue."""

    pool: str
    image: str
    nodes: int = 1
    gpus: int = 0
    cores: int = 1
    memory_gb: int = 4
    notice_s: int = 60
    site: str = ""
    namespace: str = "default"
    queue: str = ""

    def __post_init__(self) -> None:
        least = (("nodes", 1), ("gpus", 0), ("cores", 1), ("memory_gb", 1), ("notice_s", 0))
        for field, smallest in least:
            if getattr(self, field) < smallest:
                raise self._wrong(field, f"must be at least {smallest}")
        for field in ("pool", "namespace", *(["queue"] if self.queue else [])):
            if not _NAME.fullmatch(getattr(self, field)):
                raise self._wrong(field, "must be lowercase letters, digits and '-', 42 at most")
        if not re.fullmatch(r"[^\s]+", self.image):
            raise self._wrong("image", "must name an image")

    def _wrong(self, field: str, fix: str) -> ConfigError:
        return ConfigError.of(f"kubernetes: {self.pool}: {field}", getattr(self, field), fix)

    @property
    def node_names(self) -> tuple[str, ...]:
        """The names under which its nodes join."""
        return tuple(f"{self.pool}-{number}" for number in range(self.nodes))

    @property
    def object_name(self) -> str:
        """The name of its Job and its Secret."""
        return f"slackwater-{self.pool}"


def pool_manifests(
    pools: Sequence[KubernetesPool], token_of: Callable[[str, str], str]
) -> Manifest:
    """A List that `kubectl apply` takes: for each pool the tokens of its nodes, and its Job."""
    items = [item for pool in pools for item in (_secret(pool, token_of), _job(pool))]
    return {"apiVersion": "v1", "kind": "List", "items": items}


def _metadata(pool: KubernetesPool) -> Manifest:
    labels = {"app.kubernetes.io/name": "slackwater", "app.kubernetes.io/component": pool.pool}
    return {"name": pool.object_name, "namespace": pool.namespace, "labels": labels}


def _secret(pool: KubernetesPool, token_of: Callable[[str, str], str]) -> Manifest:
    tokens = {node: token_of(node, pool.pool) for node in pool.node_names}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(pool),
        "type": "Opaque",
        "stringData": tokens,
    }


def _job(pool: KubernetesPool) -> Manifest:
    metadata = _metadata(pool)
    if pool.queue:
        metadata["labels"] |= {_QUEUE_LABEL: pool.queue}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": pool.nodes,
            "parallelism": pool.nodes,
            "backoffLimit": 1000 * pool.nodes,
            # An evicted agent exits with 75: its pod has failed, so that the controller replaces
            # it, and the eviction is no failure of the pool.
            "podFailurePolicy": {
                "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}]
            },
            "suspend": bool(pool.queue),  # Kueue admits it
            "template": {"metadata": {"labels": _metadata(pool)["labels"]}, "spec": _pod(pool)},
        },
    }


def _pod(pool: KubernetesPool) -> Manifest:
    limits = {"memory": f"{pool.memory_gb}Gi"}
    if pool.gpus:
        limits["nvidia.com/gpu"] = str(pool.gpus)
    # Kubernetes expands JOB_COMPLETION_INDEX: a pod mounts only its own node's token.
    node = f"{pool.pool}-$(JOB_COMPLETION_INDEX)"
    token = {"name": "tokens", "mountPath": _TOKEN, "subPathExpr": node, "readOnly": True}
    arguments = ["agent", "--join-file", _TOKEN, "--directory", "/node"]
    arguments += ["--notice-s", str(pool.notice_s), *(["--site", pool.site] if pool.site else [])]
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": pool.notice_s + _SPARE_S,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
        "containers": [
            {
                "name": "agent",
                "image": pool.image,
                "args": arguments,
                "resources": {"requests": {"cpu": str(pool.cores), **limits}, "limits": limits},
                "volumeMounts": [token, {"name": "node", "mountPath": "/node"}],
            }
        ],
        "volumes": [
            {"name": "tokens", "secret": {"secretName": pool.object_name, "defaultMode": 0o440}},
            {"name": "node", "emptyDir": {}},
        ],
    }


def service_manifests(
    fleet: str, *, image: str, namespace: str, storage_gb: int, options: Sequence[str]
) -> Manifest:
    """A List of the control plane: its fleet file, its disk, its Deployment and its Service.

    The Service has no address of its own, so that its name leads to the pod and to every port.
    """
    labels = {"app.kubernetes.io/name": "slackwater", "app.kubernetes.io/component": "service"}
    metadata = {"name": "slackwater", "namespace": namespace, "labels": labels}
    probe = {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 10}
    arguments = ["up", "--host", "0.0.0.0", "--port", str(HTTP_PORT), "--state", "/state"]
    arguments += ["--fleet", "/fleet/fleet.toml", "--allowed-host", "slackwater", *options]
    container = {
        "name": "service",
        "image": image,
        "args": arguments,
        "ports": [{"name": "http", "containerPort": HTTP_PORT}],
        "startupProbe": probe | {"failureThreshold": 60},
        "readinessProbe": probe,
        "livenessProbe": probe | {"failureThreshold": 6},
        "volumeMounts": [
            {"name": "state", "mountPath": "/state"},
            {"name": "fleet", "mountPath": "/fleet", "readOnly": True},
        ],
    }
    pod = {
        "terminationGracePeriodSeconds": 60,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
        "containers": [container],
        "volumes": [
            {"name": "state", "persistentVolumeClaim": {"claimName": "slackwater"}},
            {"name": "fleet", "configMap": {"name": "slackwater"}},
        ],
    }
    claim = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": f"{storage_gb}Gi"}},
    }
    deployment = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},  # two would not share a state directory
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    items: list[Manifest] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "data": {"fleet.toml": fleet}},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": claim},
        {"apiVersion": "apps/v1", "kind": "Deployment", "spec": deployment},
        {"apiVersion": "v1", "kind": "Service", "spec": {"clusterIP": "None", "selector": labels}},
    ]
    items[-1]["spec"]["ports"] = [{"name": "http", "port": HTTP_PORT}]
    whole = [item | {"metadata": metadata} for item in items]
    return {"apiVersion": "v1", "kind": "List", "items": whole}
