"""What every type of the API shares: camelCase names, strictness, and rules with one wording."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


@dataclass(frozen=True)
class Rule:
    """One cross-field rule, told twice: to the API server in CEL, and to `trainingjob validate`.

    `tests/apiserver` holds the two tellings together. `field` is the path of the field at fault
    below the type that owns the rule, with a leading dot, as CEL's `fieldPath` wants it.
    """

    cel: str
    message: str
    check: Callable[[Any], bool]
    field: str = ""


class ApiModel(BaseModel):
    """Base of the API types: frozen, camelCase, unknown fields refused, no silent conversion."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for rule in self.rules:
            if not rule.check(self):
                raise PydanticCustomError(
                    "rule", "{message}", {"message": rule.message, "field": rule.field}
                )
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        made = handler.resolve_ref_schema(handler(schema))
        if cls.rules:
            made["x-kubernetes-validations"] = [_cel(rule) for rule in cls.rules]
        return made

    def dump(self) -> dict[str, Any]:
        """The object as JSON types, with camelCase keys and without what was not set."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def _cel(rule: Rule) -> dict[str, str]:
    made = {"rule": rule.cel, "message": rule.message}
    if rule.field:
        made["fieldPath"] = rule.field
    return made


QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"


class _QuantityType:
    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.str_schema(pattern=QUANTITY_PATTERN)


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    _QuantityType,
    BeforeValidator(_number_as_text),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": QUANTITY_PATTERN}),
]
"""A Kubernetes resource quantity: "500m", "2", 2, "16Gi"."""

OpenObject = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True}),
]
"""An object whose inside is somebody else's schema (a PodSpec part, the training config)."""

Count = Annotated[int, Field(ge=0, le=1_000_000)]
Seconds = Annotated[int, Field(ge=0, le=10 * 365 * 24 * 3600)]
