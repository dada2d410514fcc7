"""The manifests of a pool and of the service: what Kubernetes accepts, and where secrets are."""

import json
import os
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


# ---- against the schema of an API server: `make test-kubernetes OPENAPI=FOLDER` ----
OPENAPI = os.environ.get("SLACKWATER_KUBERNETES_OPENAPI")
GROUPS = {"v1": "api__v1", "batch/v1": "apis__batch__v1", "apps/v1": "apis__apps__v1"}


def strict(schema: Any) -> Any:
    """The schema with every field refused that it does not list, as `fieldValidation=Strict`."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items() if key != "default"}
    if "properties" in found and isinstance(found["properties"], dict):
        found.setdefault("additionalProperties", False)
    match schema.get("allOf"):
        case [{"$ref": _} as only] if "properties" not in schema:
            return strict(only)  # beside a description
    if schema.get("format") == "int-or-string":
        return {"type": ["integer", "string"]}
    return found


def kind_schema(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    version, kind = manifest["apiVersion"], manifest["kind"]
    document = json.loads((folder / f"{GROUPS[version]}_openapi.json").read_text())
    group, _, number = version.rpartition("/")
    wanted = {"group": group, "version": number, "kind": kind}
    (name,) = [
        name
        for name, schema in document["components"]["schemas"].items()
        if wanted in schema.get("x-kubernetes-group-version-kind", [])
    ]
    reference = {"$ref": f"#/components/schemas/{name}"}
    return reference | {"components": strict(document["components"])}


@pytest.mark.skipif(OPENAPI is None, reason="make test-kubernetes names a server's OpenAPI files")
@pytest.mark.parametrize("queue", ["", "rollouts"])
def test_an_api_server_of_a_release_knows_every_field(queue: str) -> None:
    pool = KubernetesPool("rollout", "registry/slackwater:1", nodes=2, gpus=1, queue=queue)
    manifests = pool_manifests([pool], token_of)["items"]
    manifests += service_manifests(
        "launcher = 'join'\n", image="image", namespace="rl", storage_gb=5, options=[]
    )["items"]
    assert len({manifest["kind"] for manifest in manifests}) >= 5
    for manifest in manifests:
        schema = kind_schema(Path(str(OPENAPI)), manifest)
        jsonschema.validate(manifest, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(manifest | {"unheardOf": 1}, schema)
