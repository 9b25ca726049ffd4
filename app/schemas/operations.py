"""Schemas for operators: the served model, statistics of recommendations, experiments, the audit log and health."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from app.schemas.fields import DOCUMENTED_NAME, Closed, Name, is_name, is_number, with_example
from storage.items.audit import NumberedEntry
from storage.records import EPOCH, OTHER

MAX_ARMS = 8  # of an experiment
MAX_SHARE = 1_000_000.0


def _shares(value: object) -> dict[str, float]:
    """Return the share of users of each model or scenario. An error names none, so it does not echo the request."""
    if not isinstance(value, dict) or not 2 <= len(value) <= MAX_ARMS or not all(map(_is_share, value.items())):
        raise PydanticCustomError(
            "no_shares",
            "must name 2 to {models} models or scenarios, each with a number above 0 and at most {most}",
            {"models": MAX_ARMS, "most": int(MAX_SHARE)},
        )
    return {name: float(share) for name, share in value.items()}


def _is_share(share: tuple[object, object]) -> bool:
    name, part = share
    return is_name(name) and is_number(part) and 0 < part <= MAX_SHARE  # so that NaN is refused too


Shares = Annotated[
    dict[str, float],
    PlainValidator(_shares),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": DOCUMENTED_NAME},
            "additionalProperties": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SHARE},
            "minProperties": 2,
            "maxProperties": MAX_ARMS,
        }
    ),
]


def _not_other(name: str) -> str:
    if name == OTHER:
        raise PydanticCustomError("other", "must not be 'other', which stands for unknown experiments in statistics")
    return name


class ServedModel(BaseModel):
    """The generation that is served, its training configuration and its measured quality."""

    generation: str
    tag: str
    device: str
    items: int
    state_bytes: int = Field(
        description="The maximum size of a user's state in bytes, whatever the length of the history."
    )
    config: dict[str, Any]
    metrics: dict[str, Any]

    model_config = with_example(
        {
            "generation": "shop",
            "tag": "9f86d081884c7d65",
            "device": "cpu",
            "items": 240,
            "state_bytes": 4000,
            "config": {"model": {"preset": "lisa-mini", "width": 128}},
            "metrics": {"hr_at_10_full": 0.26},
        }
    )


class PlaceStats(BaseModel):
    """Statistics of one place in the lists of one generation, within one experiment or outside any."""

    generation: str
    experiment: str | None
    place: int = Field(description="The place in the list, from 1 to 20.")
    shown: int = Field(description="Lists that were long enough to have this place.")
    events: dict[str, int] = Field(description="Events posted with the list's `recommendation_id`, by type.")
    value: dict[str, float] = Field(description="The sum of these events' `value` by type, if any has one.")


ListOutcome = Literal["full", "filled", "short", "empty"]
"""Whether a list had all requested items, had them only because of its fallback, had fewer, or none."""


class ScenarioStats(BaseModel):
    """Statistics of the lists of one scenario, within one experiment or outside any.

    Pages after the first do not count as lists.
    """

    scenario: str
    experiment: str | None
    lists: int = 0
    short: int = Field(0, description="Lists with some items, but fewer than requested.")
    empty: int = Field(0, description="Lists without items.")
    filled: int = Field(0, description="Full lists that contain items which only the scenario's `fallback` allows.")
    events: dict[str, int] = Field(
        default_factory=dict, description="Events posted with the `recommendation_id` of one of these lists, by type."
    )
    value: dict[str, float] = Field(
        default_factory=dict, description="The sum of these events' `value` by type, if any has one."
    )


class Stats(BaseModel):
    """Outcomes of recommendations, over all processes, with a delay of a few seconds.

    They count since the store was created, and those of a generation until its states are dropped.
    """

    places: list[PlaceStats]
    scenarios: list[ScenarioStats]

    model_config = with_example(
        {
            "places": [
                {
                    "generation": "shop",
                    "experiment": None,
                    "place": 1,
                    "shown": 1200,
                    "events": {"click": 96, "purchase": 7},
                    "value": {"purchase": 151.5},
                }
            ],
            "scenarios": [
                {
                    "scenario": "product-page",
                    "experiment": None,
                    "lists": 900,
                    "short": 12,
                    "empty": 1,
                    "events": {"click": 81, "purchase": 5},
                    "value": {"purchase": 99.9},
                }
            ],
        }
    )


class Activated(BaseModel):
    """The generation that every process serves from now on, and the one that this process served before."""

    generation: str
    tag: str
    previous: str

    model_config = with_example({"generation": "shop-june", "tag": "9f86d081884c7d65", "previous": "shop-may"})


class Experiment(Closed):
    """Models or scenarios that are served at the same time, each to its share of the users.

    The shares need not add up to 1.
    """

    model_config = with_example({"name": "june", "shares": {"shop-may": 0.9, "shop-june": 0.1}})

    name: Name = Field(description="The name of the experiment. A different name assigns users anew.")
    shares: Shares = Field(description="The share of each model or scenario, by its name.")
    over: Literal["models", "scenarios"] = Field(
        "models",
        description="What is compared. With `scenarios`, a request that names one of these scenarios gets the "
        "one that its user is assigned to.",
    )


class NewExperiment(Experiment):
    """An experiment to start."""

    name: Annotated[Name, AfterValidator(_not_other)] = Field(
        description="The name of the experiment, other than `other`. A different name assigns users anew."
    )


class Experiments(BaseModel):
    """The experiment that every process follows within about a second."""

    experiment: Experiment | None

    model_config = with_example({"experiment": {"name": "june", "shares": {"shop-may": 0.9, "shop-june": 0.1}}})


class AuditedAction(BaseModel):
    """What was done, by whom and when."""

    number: int = Field(description="The number of the entry within the tenant, from 1.")
    time: datetime
    actor: str = Field(
        description="The id of the key, `command line` or `keys file`. Empty if the service has no keys."
    )
    action: str
    subject: str = Field(description="A name, or the keyed hash of a user id.")
    details: dict[str, Any]

    @classmethod
    def of(cls, one: NumberedEntry) -> Self:
        """Return an entry of the log as an answer shows it."""
        entry = one.entry
        return cls(
            number=one.number,
            time=EPOCH + timedelta(microseconds=entry.time_us),
            actor=entry.actor,
            action=entry.action,
            subject=entry.subject,
            details=dict(entry.details),
        )


class AuditPage(BaseModel):
    """Entries of the audit log, oldest first."""

    entries: list[AuditedAction]
    next: int | None = Field(description="`after` of the next page. Null after the last page.")

    model_config = with_example(
        {
            "entries": [
                {
                    "number": 17,
                    "time": "2026-11-24T04:12:00Z",
                    "actor": "3f2a9c0b1d4e",
                    "action": "model.activate",
                    "subject": "shop-june",
                    "details": {"tag": "9f86d081884c7d65", "previous": "shop-may"},
                }
            ],
            "next": None,
        }
    )

    @classmethod
    def of(cls, found: Sequence[NumberedEntry], limit: int) -> Self:
        """Return a page of these entries. One more than the limit was read, to know whether there is a next page."""
        page = found[:limit]
        return cls(entries=[*map(AuditedAction.of, page)], next=page[-1].number if len(found) > limit else None)


class Health(BaseModel):
    """The health of a process. The status code carries the same information."""

    status: Literal["ok", "ready"]

    model_config = with_example({"status": "ok"})
