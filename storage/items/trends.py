"""Trends: how many visitors use each item, as counts with a half-life.

A stored *trend* is the base-2 logarithm of such a count, on the scale of the tenant's trend clock: a visit at clock
position p adds ``2 ** p``. Stored counts therefore never need to be halved, only visits change the order of items, and
no number grows too large. Any number of processes can add visits.

A visitor counts once for an item until the clock has passed the next whole half-life, regardless of how many others
visit it in between and in which order they return. An item's first LISTED_VISITORS are listed. Beyond them, a sketch
of fixed size, a HyperLogLog, decides whether a visitor is new. It mistakes some new visitors for known ones, and a
visitor that it recognises as new stands for them too: for `1 / p` visitors, where p is the share of all new visitors
that it would recognise at that moment. The sum is an unbiased estimate of the distinct visitors (Cohen, "All-Distances
Sketches, Revisited", 2015; Ting, "Streamed Approximate Counting of Distinct Elements", 2014), 5% off on average.

An attacker who could choose visitors' hashes could make the sketch count millions, so the hashes use a secret.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

HALF_LIFE_S = 7 * 86_400.0
MAX_STEP_S = 86_400.0
MAX_LAG_HALF_LIVES = 64.0  # half-lives behind the clock; a lower trend is not stored
MAX_LEAD_HALF_LIVES = 40.0  # half-lives ahead of the clock; a higher trend is damaged: no item has 2 ** 40 visitors
LISTED_VISITORS = 32
VISITOR_BYTES = 4  # of a hash; in a list, one in 100 million visitors collides with another one
RANK_BITS = 8 * (VISITOR_BYTES - 1)
REGISTERS = 256  # one for each first byte of a visitor
UNSEEN = Struct(">d")  # REGISTERS * p: the registers' worth of new visitors that the sketch would recognise


class Visit(NamedTuple):
    """A use of an item.

    visitor  VISITOR_BYTES of a secret hash of the user
    weight   how many visits of this moment it counts for: more than 0, at most 1
    """

    item_id: str
    visitor: bytes
    weight: float


@dataclass(frozen=True, slots=True)
class TrendClock:
    """A clock in half-lives that follows the clock of a store's machine, even if that one is wrong.

    It moves when visits are added: never backwards, and by at most MAX_STEP_S at a time. A machine's clock that is set
    wrong and then corrected therefore ages all trends by a day at most.

    position  in half-lives
    read_s    the time of the machine's clock when this one moved, in Unix seconds
    """

    position: float
    read_s: float

    @classmethod
    def first(cls, now_s: float) -> TrendClock:
        """Return the clock of a store without trends."""
        return cls(now_s / HALF_LIFE_S, now_s)

    @classmethod
    def parse(cls, text: str) -> TrendClock:
        """Parse what `str` returns."""
        position, read_s = text.split(" ")
        return cls(float(position), float(read_s))

    def __str__(self) -> str:
        """Return the clock in the form that stores keep."""
        return f"{self.position!r} {self.read_s!r}"

    def moved_to(self, now_s: float) -> TrendClock:
        """Return the clock, moved to this time of the machine's clock."""
        step_s = min(max(now_s - self.read_s, 0.0), MAX_STEP_S)
        return TrendClock(self.position + step_s / HALF_LIFE_S, now_s)

    def trend_of(self, visits: float) -> float:
        """Return the trend of this many visits now."""
        return self.position + math.log2(visits)

    def count_of(self, trend: float) -> float:
        """Return how many visits now would have this trend."""
        return math.exp2(min(trend - self.position, MAX_LEAD_HALF_LIVES))

    @property
    def limits(self) -> tuple[float, float]:
        """The lowest and the highest trend that are stored."""
        return self.position - MAX_LAG_HALF_LIVES, self.position + MAX_LEAD_HALF_LIVES


def sum_of_trends(first: float, second: float) -> float:
    """Return the trend of the visits of both trends."""
    high, low = max(first, second), min(first, second)
    return high + math.log2(1 + 2.0 ** (low - high))


def with_visitor(seen: bytes, visitor: bytes) -> tuple[bytes, float] | None:
    """Return an item's visitors with one more, and how many visitors that one stands for; None if it is known.

    seen  a list of up to LISTED_VISITORS, or a sketch: a rank for each register, then UNSEEN
    """
    if len(seen) > LISTED_VISITORS * VISITOR_BYTES:
        return _sketch_with_visitor(seen, visitor)
    listed = [seen[at : at + VISITOR_BYTES] for at in range(0, len(seen), VISITOR_BYTES)]
    if visitor in listed:
        return None
    if len(listed) < LISTED_VISITORS:
        return seen + visitor, 1.0
    sketch = bytes(REGISTERS) + UNSEEN.pack(REGISTERS)
    for one in listed:
        sketch, _ = _sketch_with_visitor(sketch, one) or (sketch, 0.0)
    return _sketch_with_visitor(sketch, visitor)


def _sketch_with_visitor(sketch: bytes, visitor: bytes) -> tuple[bytes, float] | None:
    """Do the same for a sketch. One in 2 ** r visitors of a register has rank r."""
    register, rank = visitor[0], 1 + RANK_BITS - int.from_bytes(visitor[1:]).bit_length()
    if rank <= sketch[register]:
        return None
    (unseen,) = UNSEEN.unpack_from(sketch, REGISTERS)
    ranks = sketch[:register] + bytes([rank]) + sketch[register + 1 : REGISTERS]
    return ranks + UNSEEN.pack(unseen - 2.0 ** -sketch[register] + 2.0**-rank), REGISTERS / unseen
