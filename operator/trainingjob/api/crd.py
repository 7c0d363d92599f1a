"""The CustomResourceDefinition, made from the types: `python -m trainingjob.api.crd` prints it."""

import inspect
import re
from typing import Any

import yaml

from trainingjob.api.base import ApiModel
from trainingjob.api.job import (
    GROUP,
    KIND,
    NAME_MAX,
    NAME_MESSAGE,
    NAME_PATTERN,
    PLURAL,
    VERSION,
    TrainingJob,
)
from trainingjob.api.spec import IMMUTABLE_AFTER_START, TrainingJobSpec
from trainingjob.api.status import TrainingJobStatus

_KEPT = {
    "type",
    "description",
    "default",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "format",
    "required",
}


def structural(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """`schema` (JSON Schema, as pydantic writes it) as a structural schema of Kubernetes.

    References are put in place, `anyOf: [X, null]` becomes X, titles and nulls go: an absent
    field says the same, and CEL's `has()` sees it.
    """
    if "$ref" in schema:
        target = definitions[schema["$ref"].rsplit("/", 1)[1]]
        schema = {**target, **{k: v for k, v in schema.items() if k != "$ref"}}
    if "anyOf" in schema:
        (option,) = (o for o in schema["anyOf"] if o.get("type") != "null")
        schema = {**option, **{k: v for k, v in schema.items() if k != "anyOf"}}
        return structural(schema, definitions)
    made = {
        k: v
        for k, v in schema.items()
        if (k in _KEPT or k.startswith("x-kubernetes-")) and v is not None
    }
    if isinstance(made.get("default"), dict):
        made["default"] = {k: v for k, v in made["default"].items() if v is not None}
    if "const" in schema:
        made["enum"] = [schema["const"]]
    if "description" in made:
        made["description"] = re.sub(r"\s+", " ", inspect.cleandoc(made["description"]))
    if "properties" in schema:
        made["properties"] = {
            name: structural(part, definitions) for name, part in schema["properties"].items()
        }
    if "items" in schema:
        made["items"] = structural(schema["items"], definitions)
    if isinstance(schema.get("additionalProperties"), dict):
        made["additionalProperties"] = structural(schema["additionalProperties"], definitions)
    return made


def _schema(model: type[ApiModel]) -> dict[str, Any]:
    made = model.model_json_schema(by_alias=True)
    return structural(made, made.get("$defs", {}))


def _immutability() -> list[dict[str, str]]:
    rules = []
    for path in IMMUTABLE_AFTER_START:
        parts = path.split(".")
        present = [f"has({{0}}.{'.'.join(parts[: i + 1])})" for i in range(len(parts))]
        both = " && ".join(p.format("self.spec") for p in present)
        old = " && ".join(p.format("oldSelf.spec") for p in present)
        rules.append(
            {
                "rule": "!has(oldSelf.status) || !has(oldSelf.status.startTime) || "
                f"(({both}) == ({old}) && "
                f"(!({both}) || self.spec.{path} == oldSelf.spec.{path}))",
                "message": f"spec.{path} cannot change after the job has started; to change it "
                "delete the TrainingJob and apply it again: with the same spec.checkpoint it "
                "goes on from its last checkpoint",
                "fieldPath": f".spec.{parts[0]}",
            }
        )
    return rules


_COLUMNS = [
    ("Phase", "string", ".status.phase", 0),
    ("Progress", "string", ".status.progress", 0),
    ("Workers", "string", ".status.workerSummary", 0),
    ("Attempt", "integer", ".status.attempt", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Loss", "number", ".status.training.loss", 1),
    ("GPUs", "integer", ".spec.workers.gpus", 1),
    ("Cluster", "string", ".status.cluster.name", 1),
    ("Message", "string", ".status.message", 1),
]


def crd() -> dict[str, Any]:
    """The CustomResourceDefinition of TrainingJob."""
    status = _schema(TrainingJobStatus)
    # Flux and Argo take an object without status for healthy; -1 tells them to wait.
    status["default"] = {"observedGeneration": -1}
    del status["properties"]["observedGeneration"]["default"]
    for name in ("phase", "conditions", "attempts", "failures", "charged"):
        status["properties"][name].pop("default", None)
    for part in status["properties"].values():
        part.pop("default", None)
    schema: dict[str, Any] = {
        "type": "object",
        "description": inspect.getdoc(TrainingJob),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _schema(TrainingJobSpec),
            "status": status,
        },
        "x-kubernetes-validations": [
            {
                "rule": f"size(self.metadata.name) <= {NAME_MAX} && "
                f"self.metadata.name.matches('{NAME_PATTERN}')",
                "message": f"metadata.{NAME_MESSAGE}",
            },
            *_immutability(),
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["tj"],
                "categories": ["ray"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        {"name": name, "type": kind, "jsonPath": path, "priority": priority}
                        for name, kind, path, priority in _COLUMNS
                    ],
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


def render() -> str:
    """The CustomResourceDefinition as YAML."""
    head = "# Made from operator/trainingjob/api by `make generate`; do not edit.\n"
    return head + yaml.safe_dump(crd(), sort_keys=False, width=100)


if __name__ == "__main__":
    print(render(), end="")
