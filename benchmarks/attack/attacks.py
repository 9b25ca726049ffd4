"""Attacks with a valid key: single calls at their limits, and sequences of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.schemas.events import MAX_EVENTS
from benchmarks.attack.attacked_service import USERS
from benchmarks.attack.costly_calls import (
    LONG_LOG,
    LONG_USER,
    SHORT_HISTORY,
    Call,
    operations,
    other_reads,
    plain,
    recommendations,
    writes,
)

MEMBERS = 8  # users whom visitors are merged into
NOTHING = "nothing"  # is sent by clients that only take processor time: what the others do beyond that is the service's
ONE_CALL = {
    "plain",
    "candidates",
    "history",
    "together",
    "filter",
    "boost by expressions",
    "exclude_seen",
    "repeat",
    "search",
    "personal search",
    "log",
    "events",
    "items",
    "properties",
    "vectors",
    "activate",
}


@dataclass(frozen=True)
class Attack:
    """Calls that are sent in rounds.

    calls  the calls of a turn, one after the other, by the turn's number
    """

    name: str
    calls: Callable[[int], Sequence[Call]]


def attacks(item_ids: Sequence[str], categories: Sequence[str]) -> list[Attack]:
    """Return all attacks."""
    calls = [plain(), *recommendations(item_ids, categories), *other_reads(item_ids, categories), *writes(item_ids)]
    calls += operations()
    of_one_call = [_again_and_again(call) for call in calls if call.name in ONE_CALL or call.name.startswith("batch")]

    def post_many(user: str) -> Call:
        def events(_: int) -> list[dict[str, Any]]:
            return [
                {"event_id": f"{user}-{n}", "user_id": user, "item_id": item_ids[n % len(item_ids)]}
                for n in range(MAX_EVENTS)
            ]

        return Call("events of one user", "POST", "/v1/events", events)

    def undo_and_fold(number: int) -> list[Call]:
        event = USERS * SHORT_HISTORY + number % LONG_LOG
        return [Call("undo", "DELETE", f"/v1/users/{LONG_USER}/events/history-{event}"), plain(LONG_USER)]

    def merge(number: int) -> list[Call]:
        visitor = f"visitor-{number}"
        path = f"/v1/users/member-{number % MEMBERS}/merge"
        return [post_many(visitor), Call("merge", "POST", path, lambda _: {"from": visitor})]

    def erase(number: int) -> list[Call]:
        return [post_many(f"gone-{number}"), Call("erase", "DELETE", f"/v1/users/gone-{number}")]

    corrections = [Attack("undo", undo_and_fold), Attack("merge", merge), Attack("erase", erase)]
    return [Attack(NOTHING, lambda _: []), *of_one_call, *corrections]


def _again_and_again(call: Call) -> Attack:
    return Attack(call.name, lambda _: [call])
