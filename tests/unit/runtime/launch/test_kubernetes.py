"""The manifests of a pool and of the service: what Kubernetes accepts, and where secrets are."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from slackwater.model.errors import ConfigError
from slackwater.runtime.launch.kubernetes import (
    KubernetesPool,
    pool_manifests,
    service_manifests,
)

SCHEMA = json.loads(Path(__file__).with_name("kubernetes_schema.json").read_text())
POOL = KubernetesPool("rollout", "registry/slackwater:1", nodes=3, gpus=8, notice_s=40)


def token_of(node: str, pool: str) -> str:
    return f"secret of {node} {pool}"


def made(pool: KubernetesPool = POOL) -> tuple[dict[str, Any], dict[str, Any]]:
    manifests = pool_manifests([pool], token_of)
    jsonschema.validate(manifests, SCHEMA)
    secret, job = manifests["items"]
    return secret, job


def test_a_pool_is_an_indexed_job_whose_pods_have_time_to_leave() -> None:
    _, job = made()
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 3
    pod = job["spec"]["template"]["spec"]
    arguments = pod["containers"][0]["args"]
    assert arguments[arguments.index("--notice-s") + 1] == "40"
    assert pod["terminationGracePeriodSeconds"] > 40
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"


def test_tokens_are_in_the_secret_alone_and_each_pod_sees_its_own_only() -> None:
    secret, job = made()
    assert secret["stringData"] == {
        f"rollout-{number}": f"secret of rollout-{number} rollout" for number in range(3)
    }
    assert "secret of" not in json.dumps(job)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mount = container["volumeMounts"][0]
    assert mount["name"] == pod["volumes"][0]["name"]
    assert mount["subPathExpr"] == "rollout-$(JOB_COMPLETION_INDEX)"
    assert pod["volumes"][0]["secret"]["secretName"] == secret["metadata"]["name"]
    assert container["args"][container["args"].index("--join-file") + 1] == mount["mountPath"]


def test_a_pool_of_a_kueue_queue_waits_until_it_is_admitted() -> None:
    _, job = made()
    assert not job["spec"]["suspend"]
    _, queued = made(KubernetesPool("rollout", "image", queue="spot"))
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "spot"
    assert queued["spec"]["suspend"]


def test_the_service_is_probed_and_keeps_its_state_on_a_disk() -> None:
    manifests = service_manifests(
        "launcher = 'join'\n",
        image="image",
        namespace="rl",
        storage_gb=5,
        options=["--device=cuda"],
    )
    jsonschema.validate(manifests, SCHEMA)
    kinds = {item["kind"]: item for item in manifests["items"]}
    assert set(kinds) == {"ConfigMap", "PersistentVolumeClaim", "Deployment", "Service"}
    pod = kinds["Deployment"]["spec"]["template"]
    assert kinds["Service"]["spec"]["selector"] == pod["metadata"]["labels"]
    (container,) = pod["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container["args"][-1] == "--device=cuda"


def test_the_schema_refuses_what_kubernetes_would() -> None:
    manifests = pool_manifests([POOL], token_of)
    manifests["items"][1]["spec"]["template"]["spec"]["restartPolicy"] = "Always"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifests, SCHEMA)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"nodes": 0}, "kubernetes: p: nodes: 0 must be at least 1"),
        ({"image": ""}, "kubernetes: p: image: '' must name an image"),
        ({"namespace": "A b"}, "kubernetes: p: namespace: 'A b' must be lowercase"),
    ],
)
def test_a_pool_that_kubernetes_would_refuse_is_refused_here(
    wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        KubernetesPool(**{"pool": "p", "image": "i", **wrong})
    assert said in str(error.value)
