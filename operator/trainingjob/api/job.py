"""The TrainingJob object, and reading one from a manifest."""

import re
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trainingjob.api.base import ApiModel
from trainingjob.api.spec import TrainingJobSpec
from trainingjob.api.status import TrainingJobStatus

GROUP = "raytraining.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "TrainingJob"
PLURAL = "trainingjobs"

NAME_MAX = 40
NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAME_MESSAGE = (
    f"name must have at most {NAME_MAX} characters, lower-case letters, digits and '-', "
    "beginning with a letter: names of Services are made from it"
)


class Metadata(ApiModel):
    """The part of ObjectMeta that the operator reads."""

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 1
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: list[str] = []
    deletion_timestamp: str | None = None


class TrainingJob(ApiModel):
    """A training of a model on a Ray cluster of its own."""

    api_version: Literal["raytraining.dev/v1alpha1"]
    kind: Literal["TrainingJob"]
    metadata: Metadata
    spec: TrainingJobSpec
    status: TrainingJobStatus = TrainingJobStatus()

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.metadata.namespace, self.metadata.name

    def with_status(self, status: TrainingJobStatus) -> "TrainingJob":
        """The same job with another status."""
        return self.model_copy(update={"status": status})


class InvalidJob(ValueError):
    """A manifest that the API server would refuse. `problems` has one line for each cause."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


_METADATA_READ = {field.alias or name for name, field in Metadata.model_fields.items()}


def parse(manifest: dict[str, Any]) -> TrainingJob:
    """The TrainingJob in `manifest`.

    Raises:
        InvalidJob: with the API server's wording of each problem.
    """
    metadata = manifest.get("metadata")
    known = dict(manifest)
    if isinstance(metadata, dict):
        known["metadata"] = {
            k: v for k, v in metadata.items() if k in _METADATA_READ and v is not None
        }
    try:
        job = TrainingJob.model_validate(known)
    except ValidationError as error:
        raise InvalidJob([explain(e, manifest) for e in error.errors()]) from None
    name = job.metadata.name
    if len(name) > NAME_MAX or not re.match(NAME_PATTERN, name):
        raise InvalidJob([f'"{name}": metadata.{NAME_MESSAGE}'])
    return job


def _path(location: tuple[int | str, ...]) -> str:
    made = ""
    for part in location:
        made += f"[{part}]" if isinstance(part, int) else f".{part}" if made else str(part)
    return made


def _json_type(value: Any) -> str:
    for kinds, name in (
        ((bool,), "boolean"),
        ((int,), "integer"),
        ((float,), "number"),
        ((str,), "string"),
        ((list,), "array"),
        ((dict,), "object"),
    ):
        if isinstance(value, kinds):
            return name
    return "null"


_EXPECTED = {
    "int_type": "integer",
    "int_from_float": "integer",
    "bool_type": "boolean",
    "string_type": "string",
    "list_type": "array",
    "dict_type": "object",
    "model_type": "object",
    "model_attributes_type": "object",
}


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def explain(error: ErrorDetails, manifest: Any) -> str:
    """One problem in the words of the API server: path, kind of error, value, reason."""
    path = _path(error["loc"])
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    match kind:
        case "rule":
            field = str(context["field"])
            return f'{path}{field}: Invalid value: "object": {context["message"]}'
        case "extra_forbidden":
            return f'unknown field "{path}"'
        case "missing":
            return f"{path}: Required value"
        case "literal_error":
            options = str(context["expected"]).replace(" or ", ", ").replace("'", '"')
            return f"{path}: Unsupported value: {_shown(value)}: supported values: {options}"
        case "greater_than_equal":
            reason = f"{path} in body should be greater than or equal to {context['ge']}"
        case "less_than_equal":
            reason = f"{path} in body should be less than or equal to {context['le']}"
        case "string_too_short":
            reason = f"{path} in body should be at least {context['min_length']} chars long"
        case "string_too_long":
            return f"{path}: Too long: may not be more than {context['max_length']} bytes"
        case "too_long":
            return (
                f"{path}: Too many: {context['actual_length']}: "
                f"must have at most {context['max_length']} items"
            )
        case "string_pattern_mismatch":
            reason = f"{path} in body should match '{context['pattern']}'"
        case _ if kind in _EXPECTED:
            actual = _json_type(value)
            if actual == "null":
                return f"{path}: Required value"
            reason = f'{path} in body must be of type {_EXPECTED[kind]}: "{actual}"'
            return f'{path}: Invalid value: "{actual}": {reason}'
        case _:
            return f"{path}: {error['msg']}"
    return f"{path}: Invalid value: {_shown(value)}: {reason}"
