"""Scenarios: settings of lists that a shop stores under a name, and requests with these settings."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import override

from app.schemas.event_rules import EventRule
from app.schemas.fields import (
    MAX_PARAMS,
    Boost,
    Closed,
    Expression,
    Name,
    Param,
    ParamType,
    param_type,
    parse_params,
    with_example,
)
from app.schemas.recommendations import ListSettings, Pins, RecommendationRequest
from storage.records import MAX_SCENARIO_VERSIONS

MAX_SCENARIOS = 100  # of a tenant
MAX_SCENARIO_BYTES = 1 << 14  # in JSON


# of values that are validated by a function, whose type alone would have lists taken for something unexpected
AS_IT_IS = PlainSerializer(lambda value: value, return_type=Any)

# without a type, because clients in PHP lose values of several types, and those in Go do not compile with `{}` or null
ANY_PARAM = WithJsonSchema({"description": "A value of `type`; without it, requests must set the parameter."})

Bound = Annotated[float, Field(allow_inf_nan=False)]


def _default(value: object) -> Param:
    return parse_params({"default": value})["default"]


class ScenarioParam(Closed, strict=True):
    """A parameter that requests must set, or may leave out if it has a default."""

    type: ParamType
    default: Annotated[Annotated[Param, PlainValidator(_default), AS_IT_IS] | None, ANY_PARAM] = None
    min: Bound | None = Field(None, description="The minimum of a number.")
    max: Bound | None = Field(None, description="The maximum of a number.")

    def __str__(self) -> str:
        bounds = [f"{word} {bound:g}" for word, bound in (("from", self.min), ("to", self.max)) if bound is not None]
        return " ".join([f"a {self.type}", *bounds])

    def takes(self, value: Param) -> bool:
        """Return whether a value has the type, and is within the bounds."""
        if param_type(value) != self.type:
            return False
        return not isinstance(value, float) or (
            (self.min is None or value >= self.min) and (self.max is None or value <= self.max)
        )

    @property
    def is_valid(self) -> bool:
        """Whether its type, default and bounds are consistent."""
        if self.type != "number" and (self.min is not None or self.max is not None):
            return False
        if self.min is not None and self.max is not None and self.min > self.max:
            return False
        return self.default is None or self.takes(self.default)


def _declared(value: object, validate: ValidatorFunctionWrapHandler) -> dict[str, ScenarioParam]:
    """Return the declared parameters. An error names none, so it does not echo the request."""
    try:
        if not isinstance(value, dict) or len(value) > MAX_PARAMS:
            raise ValueError
        declared: dict[str, ScenarioParam] = validate(value)
        defaults = {name: 0.0 if one.default is None else one.default for name, one in declared.items()}
        parse_params({name: list(one) if isinstance(one, tuple) else one for name, one in defaults.items()})
        if not all(one.is_valid for one in declared.values()):
            raise ValueError
    except ValueError:
        raise PydanticCustomError(
            "no_declaration",
            "must have at most {most} names, each with a type (text, number, boolean, set or numbers), a default of "
            "that type if the parameter is optional, and optionally min and max of a number, such as {example}",
            {"most": MAX_PARAMS, "example": '{"max_price": {"type": "number", "default": 50, "max": 200}}'},
        ) from None
    return declared


ScenarioParams = Annotated[dict[str, ScenarioParam], WrapValidator(_declared)]

EXAMPLE: dict[str, Any] = {
    "k": 8,
    "filter": "item.price < params.max_price && item.brand == current.brand",
    "fallback": "item.price < params.max_price",
    "boost": "item.price > 20.0 ? 0.3 : 0.0",
    "exclude_seen": "all",
    "max_per_category": 2,
    "params": {"max_price": {"type": "number", "default": 50}},
}


class ScenarioSettings(ListSettings):
    """Settings of a list. The fields have the same meaning as in a request for recommendations."""

    model_config = ConfigDict(
        strict=True, json_schema_extra={"examples": [EXAMPLE], "dependentRequired": {"fallback": ["filter"]}}
    )

    fallback: Expression | None = Field(
        None,
        description="An expression that replaces `filter` to fill a list that would be short; `true` allows "
        "any item. The other settings and the request's own filter still apply.",
    )
    boost: Annotated[Boost, AS_IT_IS] = Field(default_factory=dict)
    pin: Pins = Field(default_factory=list)
    params: ScenarioParams = Field(
        default_factory=dict,
        description="The parameters that the expressions need, by name: the type, the default if a request "
        "leaves it out, and the bounds of a number.",
    )

    @model_validator(mode="after")
    def _fallback_of_a_filter(self) -> Self:
        if self.fallback is not None and self.filter is None:
            raise PydanticCustomError("no_filter", "has `fallback` without `filter`")
        return self


VERSION_EXAMPLE: dict[str, Any] = {
    "name": "product-page",
    "version": 3,
    "changed_at": "2026-05-01T08:00:00Z",
    "changed_by": "0123456789ab",
    "settings": EXAMPLE,
}


class ScenarioVersion(BaseModel):
    """One version of a scenario: who made it and when."""

    model_config = with_example(VERSION_EXAMPLE)

    name: str
    version: int = Field(description="The number of the version, from 1.")
    changed_at: datetime
    changed_by: str = Field(
        description="The id of the key, and its note if it has one. Empty if the service has no keys."
    )
    settings: ScenarioSettings | None = Field(description="Null if this version removed the scenario.")


class ScenarioVersions(BaseModel):
    """The stored versions of a scenario, newest first."""

    model_config = with_example({"versions": [VERSION_EXAMPLE]})

    versions: Annotated[list[ScenarioVersion], Field(max_length=MAX_SCENARIO_VERSIONS)]


class ScenarioList(BaseModel):
    """The current scenarios of the tenant, in order of their names."""

    model_config = with_example({"scenarios": [VERSION_EXAMPLE]})

    scenarios: Annotated[list[ScenarioVersion], Field(max_length=MAX_SCENARIOS)]


class Rollback(Closed):
    """The version to restore."""

    model_config = ConfigDict(strict=True, json_schema_extra={"examples": [{"version": 2}]})

    version: Annotated[int, Field(ge=1)] | None = Field(None, description="Defaults to the version before the newest.")


class ScenarioPreview(Closed, strict=True):
    """Settings that are not stored, and the request to try them with."""

    scenario: Name | None = Field(None, description="A stored scenario whose settings apply where `settings` has none.")
    settings: ScenarioSettings
    request: RecommendationRequest


class ScenarioRequest(RecommendationRequest):
    """A request with the settings of its scenario. An item has to pass the filters of both.

    scenario_experiment  the name of the experiment that has chosen the scenario; "" for none
    """

    scenario_experiment: str = ""
    scenario_filter: str | None = None
    scenario_fallback: str | None = None
    scenario_categories: Sequence[str] = ()
    scenario_exclude_events: Sequence[str] = ()
    scenario_within: str | None = None

    @property
    @override
    def filters(self) -> Sequence[str]:
        return [text for text in (self.scenario_filter, self.filter) if text is not None]

    @property
    @override
    def fallback(self) -> str | None:
        return self.scenario_fallback

    @property
    @override
    def experiment(self) -> str:
        return self.scenario_experiment

    @property
    @override
    def category_groups(self) -> Sequence[Sequence[str]]:
        return [group for group in (self.scenario_categories, self.categories) if group]

    @property
    @override
    def event_rules(self) -> Sequence[EventRule]:
        of_scenario = EventRule(self.scenario_exclude_events, self.scenario_within)
        return [rule for rule in (of_scenario, EventRule(self.exclude_events, self.within)) if rule.types]
