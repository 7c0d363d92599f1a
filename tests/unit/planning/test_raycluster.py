from typing import Any

import pytest

from tests.unit.planning.world import manifest
from trainingjob.api.job import parse
from trainingjob.planning import names
from trainingjob.planning.catalogue import Catalogue
from trainingjob.planning.raycluster import (
    ClusterPlan,
    lost_fields,
    manifests,
    ray_cluster,
    token,
)
from trainingjob.planning.sizing import size
from trainingjob.planning.unfit import Unfit

POOLS = Catalogue.model_validate(
    {
        "pools": [
            {"name": "cpu", "node": {"cpu": "8", "memory": "32Gi"}, "nodeSelector": {"p": "cpu"}},
            {
                "name": "gpu",
                "gpuType": "h100",
                "node": {"gpus": 8, "cpu": "192", "memory": "1600Gi"},
                "nodeSelector": {"p": "gpu"},
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            },
            {
                "name": "gpu-spot",
                "gpuType": "h100",
                "capacityType": "spot",
                "node": {"gpus": 8, "cpu": "192", "memory": "1600Gi"},
                "nodeSelector": {"p": "spot"},
            },
        ]
    }
)


def plan(on_demand: bool = False, labels: dict[str, str] | None = None, **spec: Any) -> ClusterPlan:
    body = manifest(**spec)
    body["metadata"]["labels"] = labels or {}
    job = parse(body)
    sizing = size(job.spec.workers, POOLS, job.spec.spot.policy)
    return ClusterPlan(job, sizing, POOLS, generation=1, token="t", on_demand=on_demand)


def worker(made: dict[str, Any], group: int = 0) -> dict[str, Any]:
    spec: dict[str, Any] = made["spec"]["workerGroupSpecs"][group]["template"]["spec"]
    return spec


def head(made: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = made["spec"]["headGroupSpec"]["template"]["spec"]
    return spec


def test_sixteen_gpus_become_two_whole_nodes() -> None:
    made = ray_cluster(plan(workers={"gpus": 16}))
    (group,) = made["spec"]["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (2, 2, 2)
    assert group["rayStartParams"]["num-gpus"] == "8"
    resources = worker(made)["containers"][0]["resources"]
    assert resources["limits"] == resources["requests"]
    assert resources["limits"]["nvidia.com/gpu"] == "8"
    assert resources["limits"]["cpu"] == "192"
    assert worker(made)["nodeSelector"] == {"p": "gpu"}
    assert worker(made)["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]


def test_no_task_lands_on_the_head_and_it_is_on_demand() -> None:
    made = ray_cluster(plan(workers={"gpus": 16}, spot={"policy": "Require"}))
    params = made["spec"]["headGroupSpec"]["rayStartParams"]
    assert (params["num-cpus"], params["num-gpus"]) == ("0", "0")
    assert head(made)["nodeSelector"] == {"p": "cpu"}


def test_prefer_spot_renders_two_groups_in_a_fixed_order() -> None:
    spot = {"policy": "Prefer"}
    first = ray_cluster(plan(workers={"gpus": 8}, spot=spot))["spec"]["workerGroupSpecs"]
    assert [(g["groupName"], g["replicas"]) for g in first] == [("spot", 1), ("on-demand", 0)]
    later = ray_cluster(plan(True, workers={"gpus": 8}, spot=spot))["spec"]["workerGroupSpecs"]
    assert [(g["groupName"], g["replicas"]) for g in later] == [("spot", 0), ("on-demand", 1)]


def test_every_child_belongs_to_the_job_and_carries_its_labels() -> None:
    made = manifests(
        plan(
            labels={
                "team": "nlp",
                "app.kubernetes.io/instance": "argo",
                "helm.sh/chart": "x",
                "kustomize.toolkit.fluxcd.io/name": "x",
                "argocd.argoproj.io/instance": "x",
            }
        )
    )
    assert [m["kind"] for m in made] == ["Secret", "ConfigMap", "RayCluster"]
    for child in made:
        meta = child["metadata"]
        assert meta["ownerReferences"][0]["controller"] is True
        assert set(meta["labels"]) == {
            "team",
            names.JOB_LABEL,
            names.UID_LABEL,
            names.MANAGED_LABEL,
            names.GENERATION_LABEL,
        }


def test_ray_asks_everybody_for_the_token_which_is_only_in_the_secret() -> None:
    made = ray_cluster(plan())
    for pod in (head(made), worker(made)):
        env = {e["name"]: e for e in pod["containers"][0]["env"]}
        assert env["RAY_AUTH_MODE"]["value"] == "token"
        assert "secretKeyRef" in env["RAY_AUTH_TOKEN"]["valueFrom"]


def test_a_user_cannot_switch_authentication_off() -> None:
    made = ray_cluster(plan(env=[{"name": "RAY_AUTH_MODE", "value": "disabled"}]))
    modes = [e for e in head(made)["containers"][0]["env"] if e["name"] == "RAY_AUTH_MODE"]
    assert modes == [{"name": "RAY_AUTH_MODE", "value": "token"}]


def test_tokens_differ_between_jobs_and_between_keys() -> None:
    tokens = {token(b"k" * 32, "a"), token(b"k" * 32, "b"), token(b"l" * 32, "a")}
    assert len(tokens) == 3


def test_a_claim_is_mounted_in_head_and_workers() -> None:
    checkpoint = {"persistentVolumeClaim": {"claimName": "ckpt", "subPath": "runs"}}
    made = ray_cluster(plan(checkpoint=checkpoint))
    for pod in (head(made), worker(made)):
        assert {"name": "trainingjob-storage", "persistentVolumeClaim": {"claimName": "ckpt"}} in (
            pod["volumes"]
        )
        (mount,) = [
            m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "trainingjob-storage"
        ]
        assert mount["subPath"] == "runs"


def test_pods_get_no_service_account_token() -> None:
    made = ray_cluster(plan())
    assert head(made)["automountServiceAccountToken"] is False
    assert worker(made)["automountServiceAccountToken"] is False


def test_a_pod_template_is_merged_and_rays_container_stays_first() -> None:
    template = {
        "metadata": {"annotations": {"a": "b"}},
        "spec": {
            "serviceAccountName": "trainer",
            "containers": [
                {"name": "sidecar", "image": "s"},
                {"name": "ray-worker", "env": [{"name": "X", "value": "1"}]},
            ],
            "tolerations": [{"key": "mine"}],
        },
    }
    made = ray_cluster(plan(workers={"gpus": 8}, worker={"podTemplate": template}))
    pod = worker(made)
    assert [c["name"] for c in pod["containers"]] == ["ray-worker", "sidecar"]
    names_of_env = [e["name"] for e in pod["containers"][0]["env"]]
    assert {"X", "RAY_AUTH_MODE"} <= set(names_of_env)
    assert pod["containers"][0]["image"] == "trainer"
    assert pod["serviceAccountName"] == "trainer"
    assert {"key": "mine"} in pod["tolerations"]
    assert len(pod["tolerations"]) == 2
    annotations = made["spec"]["workerGroupSpecs"][0]["template"]["metadata"]["annotations"]
    assert annotations["a"] == "b"
    assert annotations["karpenter.sh/do-not-disrupt"] == "true"


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ({"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy"),
        (
            {"spec": {"containers": [{"name": "ray-head", "command": ["sh"]}]}},
            r"spec.containers\[ray-head\].command",
        ),
        ({"sepc": {}}, "sepc"),
        ({"spec": []}, "spec"),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.containers"),
    ],
)
def test_a_pod_template_that_would_break_the_cluster_is_refused(
    template: dict[str, Any], field: str
) -> None:
    with pytest.raises(Unfit, match=f"spec.head.podTemplate.{field} is not allowed"):
        ray_cluster(plan(head={"podTemplate": template}))


def test_a_config_larger_than_a_config_map_is_refused() -> None:
    with pytest.raises(Unfit, match="keep large parts in the image"):
        ray_cluster(plan(config={"x": "y" * 1_000_000}))


def test_fields_that_the_api_server_did_not_keep_are_named() -> None:
    sent = {"a": 1, "b": {"c": [{"d": 1, "e": 2}]}, "f": {}}
    assert lost_fields(sent, sent) == []
    assert lost_fields(sent, {"a": 2, "b": {"c": [{"d": 1}]}}) == ["b.c.e"]
    assert lost_fields(sent, {"b": {"c": []}}) == ["a", "b.c"]
