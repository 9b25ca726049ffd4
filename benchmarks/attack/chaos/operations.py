"""Operations of the clients in the chaos run, with times and outcomes, against which a store is judged."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

OperationKind = Literal["append", "read", "undo", "merge", "erase"]
Outcome = Literal["done", "refused", "unknown"]

EventKey = tuple[str, str]
"""The user and the id that an event was posted with."""


@dataclass(slots=True)
class Operation:
    """An operation of a client on a user, from its first request to its final response.

    family     users that may become one another have the same
    began_s    monotonic
    ended_s    monotonic; infinite where it may still be applied, or never was
    attempts   requests that were sent; any of them may have been applied, and at any time
    event_ids  append: ids in the request's order; read: ids of the log, in log order; undo: the one
    visitor    merge: who became the user
    """

    kind: OperationKind
    family: int
    user_id: str
    began_s: float
    event_ids: Sequence[str] = ()
    visitor: str = ""
    ended_s: float = math.inf
    attempts: int = 0
    outcome: Outcome = "unknown"

    @property
    def is_done(self) -> bool:
        """Return whether the operation was acknowledged."""
        return self.outcome == "done"

    @property
    def last_effect_s(self) -> float:
        """Return the latest time at which a request of this operation may take effect."""
        return self.ended_s if self.attempts == 1 and self.outcome != "unknown" else math.inf

    def end(self, outcome: Outcome, now_s: float) -> None:
        """Record the outcome. A refusal after an unanswered attempt does not tell if that was applied."""
        self.outcome = "unknown" if outcome == "refused" and self.attempts > 1 else outcome
        self.ended_s = math.inf if self.outcome == "unknown" else now_s


@dataclass(frozen=True, slots=True)
class AcceptedLoss:
    """A store, or a part of it, was rolled back permanently, and an operator accepted the loss.

    since_s     what was acknowledged before is in it
    until_s     what began later is in it
    archived    events that the archive held: it brings them back
    is_noticed  whether a service has refused the store until it was accepted
    """

    since_s: float
    until_s: float
    archived: frozenset[EventKey]
    is_noticed: bool

    def may_lack(self, operation: Operation) -> bool:
        """Return whether the effect of the operation may be lost."""
        return self.since_s <= operation.ended_s and operation.began_s <= self.until_s


@dataclass
class OperationLog:
    """All operations by start time, the item of each event, and possible losses.

    takeovers  when replicas took over, from and until: what was read before they had it, and nobody acknowledged, may
               be gone, and come back in another order
    """

    operations: list[Operation] = field(default_factory=list)
    losses: list[AcceptedLoss] = field(default_factory=list)
    takeovers: list[tuple[float, float]] = field(default_factory=list)
    items: dict[EventKey, str] = field(default_factory=dict)

    def users(self) -> list[str]:
        """Return the ids of all users in order; some are known only as merged."""
        ids = {user_id for operation in self.operations for user_id in (operation.user_id, operation.visitor)}
        return sorted(ids - {""})

    def of_kind(self, kind: OperationKind) -> Iterable[Operation]:
        """Return the operations of a kind."""
        return (operation for operation in self.operations if operation.kind == kind)

    def losses_of(self, operation: Operation) -> list[AcceptedLoss]:
        """Return the losses that may include the operation."""
        return [loss for loss in self.losses if loss.may_lack(operation)]

    def is_beside_a_takeover(self, operation: Operation) -> bool:
        """Return whether the operation overlaps with a failover."""
        return any(since_s <= operation.ended_s and operation.began_s <= until_s for since_s, until_s in self.takeovers)

    def posts(self) -> dict[EventKey, list[Operation]]:
        """Return the operations that posted each event, including resends."""
        posts: defaultdict[EventKey, list[Operation]] = defaultdict(list)
        for operation in self.of_kind("append"):
            for event_id in operation.event_ids:
                posts[operation.user_id, event_id].append(operation)
        return posts

    def erasures(self) -> dict[int, list[Operation]]:
        """Return the possibly applied erasures by family."""
        erasures: defaultdict[int, list[Operation]] = defaultdict(list)
        for operation in self.of_kind("erase"):
            if operation.outcome != "refused":
                erasures[operation.family].append(operation)
        return erasures
