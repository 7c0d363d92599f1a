"""The API server accepts what it should and refuses what it should, in the words that
`trainingjob validate` uses."""

import copy
import json
from typing import Any

import pytest

from tests.lab.controlplane import ControlPlane
from tests.lab.proc import LabError
from tests.unit.planning.world import manifest
from trainingjob.api.job import InvalidJob, parse


def with_name(name: str) -> dict[str, Any]:
    body = manifest()
    body["metadata"]["name"] = name
    return body


def without(field: str) -> dict[str, Any]:
    body = manifest()
    del body["spec"][field]
    return body


PVC = {"persistentVolumeClaim": {"claimName": "c"}}

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "neither gpus nor replicas": (
        manifest(workers={}),
        "set gpus (training on GPUs) or replicas (training on CPUs)",
    ),
    "negative gpus": (
        manifest(workers={"gpus": -1}),
        "spec.workers.gpus in body should be greater than or equal to 0",
    ),
    "fractional gpus": (
        manifest(workers={"gpus": 1.5}),
        'spec.workers.gpus in body must be of type integer: "number"',
    ),
    "gpus in words": (
        manifest(workers={"gpus": "four"}),
        'spec.workers.gpus in body must be of type integer: "string"',
    ),
    "gpus no multiple of replicas": (
        manifest(workers={"gpus": 4, "replicas": 3}),
        "gpus must be a multiple of replicas: every worker pod holds the same number of GPUs",
    ),
    "gpuTypes without gpus": (
        manifest(workers={"replicas": 1, "gpuTypes": ["h100"]}),
        "gpuTypes needs gpus",
    ),
    "name too long": (with_name("a" * 41), "metadata.name must have at most 40 characters"),
    "name not DNS-1035": (with_name("1job"), "metadata.name must have at most 40 characters"),
    "unknown field": (manifest(gpus=4), 'unknown field "spec.gpus"'),
    "unknown nested field": (
        manifest(workers={"replicas": 1, "gpu": 2}),
        'unknown field "spec.workers.gpu"',
    ),
    "both checkpoint kinds": (
        manifest(checkpoint={"uri": "s3://b/p", **PVC}),
        "set exactly one of uri and persistentVolumeClaim",
    ),
    "no checkpoint kind": (
        manifest(checkpoint={}),
        "set exactly one of uri and persistentVolumeClaim",
    ),
    "a uri of no known kind": (
        manifest(checkpoint={"uri": "ftp://x"}),
        "spec.checkpoint.uri in body should match '^(s3|gs|file)://.+$'",
    ),
    "no image": (without("image"), "spec.image: Required value"),
    "empty entrypoint": (
        manifest(entrypoint=""),
        "spec.entrypoint in body should be at least 1 chars long",
    ),
    "no version": (
        manifest(rayVersion="latest"),
        r"spec.rayVersion in body should match '^[0-9]+\.[0-9]+\.[0-9]+$'",
    ),
    "an old ray": (manifest(rayVersion="2.9.0"), "rayVersion must be 2.52.0 or newer"),
    "an unknown spot policy": (
        manifest(workers={"gpus": 8}, spot={"policy": "Sometimes"}),
        'spec.spot.policy: Unsupported value: "Sometimes": supported values: '
        '"Never", "Prefer", "Require"',
    ),
    "spot without gpus": (manifest(spot={"policy": "Prefer"}), "spot needs workers.gpus"),
    "negative budget": (
        manifest(failurePolicy={"maxUserFailures": -1}),
        "spec.failurePolicy.maxUserFailures in body should be greater than or equal to 0",
    ),
    "backoff above its ceiling": (
        manifest(failurePolicy={"backoffSeconds": 700}),
        "backoffSeconds must not exceed maxBackoffSeconds",
    ),
    "a deadline of nothing": (
        manifest(deadlines={"provisioningSeconds": 0}),
        "spec.deadlines.provisioningSeconds in body should be greater than or equal to 1",
    ),
    "a quantity that is none": (
        manifest(workers={"replicas": 1, "memory": "lots"}),
        "spec.workers.memory in body should match",
    ),
    "value and valueFrom": (
        manifest(env=[{"name": "X", "value": "1", "valueFrom": {}}]),
        "set value or valueFrom, not both",
    ),
    "suspend in words": (
        manifest(suspend="yes"),
        'spec.suspend in body must be of type boolean: "string"',
    ),
}


def apply(plane: ControlPlane, body: dict[str, Any], *arguments: str) -> str:
    """Applies the object; returns the refusal, or nothing."""
    body = copy.deepcopy(body)
    body["metadata"] = {"name": body["metadata"]["name"], "namespace": "default"}
    try:
        plane.kubectl("apply", "-f", "-", *arguments, input=json.dumps(body))
    except LabError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_at_apply_and_by_validate_in_the_same_words(
    control_plane: ControlPlane, case: str
) -> None:
    body, message = BAD[case]
    refusal = apply(control_plane, body, "--dry-run=server")
    assert message in refusal
    with pytest.raises(InvalidJob) as found:
        parse(body)
    assert message in str(found.value)
    if "unknown field" not in message:
        for problem in found.value.problems:
            assert problem.removeprefix(f'"{body["metadata"]["name"]}": ') in refusal


GOOD: dict[str, dict[str, Any]] = {
    "the least": manifest(),
    "forty characters": with_name("a" * 40),
    "numbers as quantities": manifest(workers={"replicas": 1, "cpu": 2, "memory": "1Gi"}),
    "nulls": manifest(failurePolicy={"maxPreemptions": None}, checkpoint=None),
    "everything": manifest(
        workers={"gpus": 16, "replicas": 2, "gpuTypes": ["h100"], "sharedMemory": "8Gi"},
        spot={"policy": "Prefer", "fallbackAfterSeconds": 60},
        checkpoint={"uri": "s3://bucket/path"},
        config={"any": {"thing": [1, "two", None]}},
        env=[{"name": "A", "value": "b"}, {"name": "C", "valueFrom": {"fieldRef": {}}}],
        head={"cpu": "1", "podTemplate": {"spec": {"serviceAccountName": "x"}}},
        deadlines={"totalSeconds": 100},
        cleanup={"ttlSecondsAfterFinished": 60},
    ),
}


@pytest.mark.parametrize("case", GOOD)
def test_good_input_is_accepted_by_both(control_plane: ControlPlane, case: str) -> None:
    parse(GOOD[case])
    assert apply(control_plane, GOOD[case], "--dry-run=server") == ""


def stored(plane: ControlPlane, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plane.kubectl("get", "tj", name, "-o", "json"))
    return found


def test_both_fill_in_the_same_defaults(control_plane: ControlPlane) -> None:
    body = with_name("defaults")
    assert apply(control_plane, body) == ""
    spec = stored(control_plane, "defaults")["spec"]
    assert parse(stored(control_plane, "defaults")).spec == parse(body).spec
    assert parse(body).spec.dump() == spec


def test_a_new_object_is_not_taken_for_a_healthy_one(control_plane: ControlPlane) -> None:
    assert apply(control_plane, with_name("fresh")) == ""
    assert stored(control_plane, "fresh")["status"] == {"observedGeneration": -1}


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("image", "other"),
        ("rayVersion", "2.61.0"),
        ("entrypoint", "other"),
        ("workers", {"replicas": 3}),
        ("checkpoint", {"uri": "s3://b/other"}),
        ("head", {"memory": "16Gi"}),
    ],
)
def test_what_a_cluster_was_made_from_cannot_change_after_the_start(
    control_plane: ControlPlane, field: str, change: Any
) -> None:
    name = f"started-{field.lower()}"
    body = with_name(name)
    assert apply(control_plane, body) == ""
    changed = copy.deepcopy(body)
    changed["spec"][field] = change
    assert apply(control_plane, changed, "--dry-run=server") == "", "before the start it can"
    control_plane.kubectl(
        "patch",
        "tj",
        name,
        "--subresource=status",
        "--type=merge",
        "-p",
        '{"status": {"startTime": "2026-01-01T00:00:00Z"}}',
    )
    refusal = apply(control_plane, changed, "--dry-run=server")
    assert "cannot change after the job has started" in refusal
    assert "delete the TrainingJob and apply it again" in refusal
    suspended = copy.deepcopy(body)
    suspended["spec"]["suspend"] = True
    assert apply(control_plane, suspended) == "", "what may change still can"


def test_the_columns_show_phase_progress_workers_attempt_and_age(
    control_plane: ControlPlane,
) -> None:
    assert apply(control_plane, with_name("columns")) == ""
    head = control_plane.kubectl("get", "tj", "columns").splitlines()[0].split()
    assert head == ["NAME", "PHASE", "PROGRESS", "WORKERS", "ATTEMPT", "AGE"]


def test_the_status_is_a_subresource(control_plane: ControlPlane) -> None:
    body = with_name("isolated")
    body["status"] = {"phase": "Succeeded"}
    assert apply(control_plane, body) == ""
    assert "phase" not in stored(control_plane, "isolated")["status"]
