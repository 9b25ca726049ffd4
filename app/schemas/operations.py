"""What operators ask for: the served model, statistics of recommendations, experiments, the audit log and health."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from app.schemas.fields import Closed, Id, ResultCount, Shares, plain_digits
from storage.items.audit import NumberedEntry
from storage.records import EPOCH


class ServedModel(BaseModel):
    """The generation that is served, what it was trained on and how it measured."""

    generation: str
    tag: str
    device: str
    items: int
    state_bytes: int = Field(description="what is kept of one user, however long the history")
    config: dict[str, Any]
    metrics: dict[str, Any]

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "generation": "shop",
                    "tag": "9f86d081884c7d65",
                    "device": "cpu",
                    "items": 240,
                    "state_bytes": 4000,
                    "config": {"model": {"preset": "lisa-mini", "width": 128}},
                    "metrics": {"hr_at_10_full": 0.26},
                }
            ]
        }
    )


class PlaceStats(BaseModel):
    """Of one place of the lists that one generation made, in one experiment or outside of any."""

    generation: str
    experiment: str | None
    place: int = Field(description="from 1 to 20")
    shown: int = Field(description="lists that were as long")
    events: dict[str, int] = Field(description="by type, what was posted with the list's recommendation_id")
    value: dict[str, float] = Field(description="by type, the sum of these events' `value`, where they have one")


ListOutcome = Literal["full", "filled", "short", "empty"]
"""Whether a list had as many items as were asked for, had them by its fallback alone, had fewer, or none."""


class ScenarioStats(BaseModel):
    """Of the lists of one scenario, in one experiment or outside of any; pages after the first are no lists."""

    scenario: str
    experiment: str | None
    lists: int = 0
    short: int = Field(0, description="of them with fewer items than were asked for, but some")
    empty: int = Field(0, description="of them without any item")
    filled: int = Field(0, description="of them with items that the scenario's fallback alone allows, and not short")
    events: dict[str, int] = Field(
        default_factory=dict, description="by type, what was posted with the recommendation_id of one of them"
    )
    value: dict[str, float] = Field(
        default_factory=dict, description="by type, the sum of these events' `value`, where they have one"
    )


class Stats(BaseModel):
    """What came of recommendations: of all processes, some seconds ago, since the data were begun."""

    places: list[PlaceStats]
    scenarios: list[ScenarioStats]

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
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
            ]
        }
    )


class Activated(BaseModel):
    """The generation that every process of the service is to serve from now on, and the one that this one served."""

    generation: str
    tag: str
    previous: str

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"generation": "shop-june", "tag": "9f86d081884c7d65", "previous": "shop-may"}]}
    )


class Experiment(Closed):
    """Generations or scenarios that are live together, each for its share of the users; shares need not add up to 1."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"name": "june", "shares": {"shop-may": 0.9, "shop-june": 0.1}}]}
    )

    name: Id = Field(description="another name mixes the users anew")
    shares: Shares = Field(description="by the name of the model, or of the scenario")
    over: Literal["models", "scenarios"] = Field(
        "models",
        description="what is compared; each request of a user that names one of the scenarios gets the user's",
    )


class Experiments(BaseModel):
    """The experiment that every process goes by within a second or so."""

    experiment: Experiment | None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"experiment": {"name": "june", "shares": {"shop-may": 0.9, "shop-june": 0.1}}}]
        }
    )


class AuditQuery(Closed):
    """A page of the audit log."""

    after: Annotated[int, Field(ge=0, le=2**53), BeforeValidator(plain_digits)] = Field(
        0, description="`next` of the page before"
    )
    limit: ResultCount = 100


class AuditedAction(BaseModel):
    """What was done, by whom and when."""

    number: int = Field(description="among those of the tenant, from 1")
    time: datetime
    actor: str = Field(description="the id of the key, `command line` or `keys file`; empty without keys")
    action: str
    subject: str = Field(description="a name, or the keyed hash of a user's id")
    details: dict[str, Any]

    @classmethod
    def of(cls, one: NumberedEntry) -> Self:
        """Return an entry of the log as answers have it."""
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
    next: int | None = Field(description="`after` of the next page; null after the last")

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
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
            ]
        }
    )

    @classmethod
    def of(cls, found: Sequence[NumberedEntry], limit: int) -> Self:
        """Return a page of these entries, of which one more than the limit was read."""
        page = found[:limit]
        return cls(entries=[*map(AuditedAction.of, page)], next=page[-1].number if len(found) > limit else None)


class Health(BaseModel):
    """What a load balancer asks for; the status code says it all."""

    status: Literal["ok", "ready"]

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "ok"}]})
