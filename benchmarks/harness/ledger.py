"""A ledger of the events that clients sent and that were acknowledged, and the comparison of a store with it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from uuid_utils import uuid7

from storage.protocol import UserStore
from storage.state.event import Event
from storage.state.fold import fold_event
from storage.state.generation import Generation

HOUR_S = 3600
TENANT = "main"
COLD_USERS = 3_000
RENAMED = "~"  # begins the suffix that a service without guard adds to an id; no id in a request may contain it

EventJson = dict[str, str | float]


class Ledger:
    """Events by number, in the order of their creation."""

    def __init__(self, item_ids: Sequence[str], seed: int) -> None:
        self.user_ids: list[str] = []
        self.event_ids: list[str] = []
        self.timestamps: list[float | None] = []
        self.acknowledged = bytearray()  # 1: a client has received 2xx
        self.acknowledgements = 0  # of distinct events
        self._item_ids = item_ids
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self.event_ids)

    def item_id(self, number: int) -> str:
        """Return the item of an event."""
        return self._item_ids[number * 7919 % len(self._item_ids)]

    def new(self, user_id: str | None, now_s: float) -> int:
        """Create an event, of a random cold user if none is named.

        Half of the events have a UUIDv7. A fifth have no timestamp, a fifth one of an hour ago.
        """
        number = len(self)
        kind = self._random.random()
        self.user_ids.append(user_id or f"cold-{self._random.randrange(COLD_USERS)}")
        self.event_ids.append(str(uuid7()) if self._random.random() < 0.5 else f"own-{number}")
        self.timestamps.append(None if kind < 0.2 else now_s - HOUR_S if kind < 0.4 else now_s)
        self.acknowledged.append(0)
        return number

    def body(self, number: int) -> EventJson:
        """Return the event as a client posts it."""
        event: EventJson = {
            "event_id": self.event_ids[number],
            "user_id": self.user_ids[number],
            "item_id": self.item_id(number),
        }
        timestamp = self.timestamps[number]
        return event if timestamp is None else event | {"timestamp": timestamp}

    def resent(self) -> tuple[int, EventJson] | None:
        """Return an event to send again, and its number; None if the drawn event is not acknowledged yet.

        Half of them are recent events, perhaps still in flight, unchanged. The others are acknowledged events of any
        age: unchanged, without their timestamp, or with one that is an hour older. Four fifths of all events are never
        sent again, because a resend would hide a loss.
        """
        is_recent = self._random.random() < 0.5
        number = self._random.randrange(max(0, len(self) - 500) if is_recent else 0, len(self)) // 5 * 5
        event = self.body(number)
        if is_recent:
            return number, event
        if not self.acknowledged[number]:
            return None
        change = self._random.randrange(3)
        if "timestamp" in event and change:
            time_s = float(event.pop("timestamp"))
            if change == 2:
                event["timestamp"] = time_s - HOUR_S
        return number, event

    def acknowledge(self, numbers: list[int]) -> None:
        """Note that a client has received 2xx for these events."""
        for number in numbers:
            self.acknowledgements += 1 - self.acknowledged[number]
            self.acknowledged[number] = 1


@dataclass
class StoreVerdict:
    """The faults of a store; it is correct if all lists are empty."""

    users: int = 0
    logged: int = 0
    lost: list[str] = field(default_factory=list)  # ids of acknowledged events that are not in the log
    duplicated: list[str] = field(default_factory=list)  # ids that occur more than once in the log
    unsent: list[str] = field(default_factory=list)  # ids in the log that no client sent for this user and item
    unfolded: list[str] = field(default_factory=list)  # users whose state is not the fold of their log

    @property
    def is_correct(self) -> bool:
        """Whether the store has no fault."""
        return not (self.lost or self.duplicated or self.unsent or self.unfolded)

    def __str__(self) -> str:
        return (
            f"{self.logged:,} events of {self.users:,} users in the log: {len(self.lost):,} acknowledged ones lost, "
            f"{len(self.duplicated):,} counted twice, {len(self.unsent):,} never sent; "
            f"{len(self.unfolded):,} states are not the fold of their log"
        )


async def judge(store: UserStore, generation: Generation, ledger: Ledger) -> StoreVerdict:
    """Compare each user's log with the events sent and acknowledged, and each state with the log."""
    numbers_of: defaultdict[str, list[int]] = defaultdict(list)
    for number, user_id in enumerate(ledger.user_ids):
        numbers_of[user_id].append(number)
    verdict = StoreVerdict(users=len(numbers_of))
    for user_id, numbers in numbers_of.items():
        entries = await store.events(TENANT, user_id, limit=10**8)
        log = [entry.record for entry in entries if isinstance(entry.record, Event)]
        (value,) = await store.states(TENANT, [user_id], generation)
        verdict.logged += len(log)
        _judge_log(verdict, ledger, numbers, log)
        if not is_fold(generation, value, log):
            verdict.unfolded.append(user_id)
    return verdict


def _judge_log(verdict: StoreVerdict, ledger: Ledger, numbers: list[int], log: list[Event]) -> None:
    sent = {ledger.event_ids[number]: number for number in numbers}
    found: set[str] = set()
    for event in log:
        event_id = event.event_id.partition(RENAMED)[0]
        if event_id in found:
            verdict.duplicated.append(event_id)
        found.add(event_id)
        if event_id not in sent or event.item_id != ledger.item_id(sent[event_id]):
            verdict.unsent.append(event_id)
    verdict.lost += [
        event_id for event_id, number in sent.items() if ledger.acknowledged[number] and event_id not in found
    ]


def is_fold(generation: Generation, value: bytes | None, log: list[Event]) -> bool:
    """Return whether the encoded state is the fold of the log; an empty log has no state."""
    if value is None or not log:
        return value is None and not log
    folded = generation.empty()
    for event in log:
        fold_event(generation, folded, event)
    return same_states(generation, [value], [generation.encode(folded)])


def same_states(generation: Generation, values: list[bytes], others: list[bytes]) -> bool:
    """Return whether the encoded states are equal in pairs, their histograms up to rounding."""
    ones, twos = generation.decode_many(values), generation.decode_many(others)
    same = all(np.array_equal(ones[name], twos[name]) for name in ones.dtype.names or () if name != "bins")
    return same and np.allclose(generation.histograms(ones), generation.histograms(twos), rtol=1e-5, atol=1e-12)
