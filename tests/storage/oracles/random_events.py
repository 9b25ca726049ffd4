"""A small catalogue, generations of it, and random events on it."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
from hypothesis import strategies as st

from storage.state.event import IMPRESSION, CodesByTag, Event
from storage.state.generation import Generation

KNOWN_ITEMS = 12
NEW_ITEMS = 2
CODEWORDS = 32
RATES = (0.0, 0.05, 0.8)
WEIGHTS = {"click": 1.0, "buy": 3.5, "view": 0.25, "dislike": -1.0, "impression": 0.0}
UNSEEN = ("view", "impression")
START_US = 1_700_000_000_000_000
LAST_S = 253_402_300_799  # the latest time that the API takes; its negative is the earliest
TIMES_US = (
    st.integers(0, 5).map(lambda step: START_US + step)
    | st.integers(0, 5).map(lambda second: START_US + second * 1_000_000)
    | st.sampled_from([-LAST_S, -1, 0, 1, 2**32 - 1, 2**32, LAST_S]).map(lambda second: second * 1_000_000)
)
HOT_USERS = ("hot:1", "hot:2")  # of shared events
VISITS = 3  # events of each visitor who is merged
# ids that look like several, or like the marks of an encoding
ODD_IDS = ("item1 item2", " ", "", '","', "[]", "null", "\\", "|", "\0", "\n", "a/b", "ä\u2028\U0001f375")
# codes of items that no model has learned, for one generation or both; some that fit neither
ONE = (b"gen one\0", bytes.fromhex("000102031c1d1e1f"))
TWO = (b"gen two\0", bytes.fromhex("0a0b0c0d"))
WRONG = (b"gen one\0", b"\xff" * 8)
TOO_LONG = (b"gen one\0", ONE[1] + b"\0")
WITH_CODES: list[tuple[str, CodesByTag]] = [
    ("click", (ONE,)),
    ("buy", (TWO, ONE)),
    ("view", (ONE, TWO)),
    ("dislike", (ONE,)),
    ("click", (WRONG,)),
    ("click", (TOO_LONG,)),
    ("buy", ((b"gen one\0", b""),)),
]
OTHER_TYPES = ("click", "click", "never heard of")
TYPES: list[tuple[str, CodesByTag]] = [(kind, ()) for kind in (*WEIGHTS, *OTHER_TYPES) if kind != IMPRESSION]


def make_generation(
    tag: bytes = b"gen one\0",  # ends in a zero byte, which a numpy string would lose
    rates: tuple[float, ...] = RATES,
    codebooks: int = 8,
    items: int = KNOWN_ITEMS,
    seed: int = 0,
    id_ring: int = 20,
    soft: bool = False,
) -> Generation:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, CODEWORDS, (items, codebooks), dtype=np.uint8)
    shares = rng.dirichlet(np.ones(CODEWORDS), (items, codebooks)).astype(np.float32) if soft else None
    index = {f"item{row}": row for row in range(items)}
    return Generation(tag, rates, CODEWORDS, index, codes, WEIGHTS, UNSEEN, id_ring=id_ring, shares=shares)


def click(event_id: str, user_id: str = "u", item: int = 0, timestamp_us: int = START_US) -> Event:
    return Event(event_id, user_id, f"item{item}", "click", timestamp_us, timestamp_us)


def as_impression(event: Event, items: Iterable[str]) -> Event:
    """The event as an impression of these items."""
    return replace(event, type=IMPRESSION, item_id="", items=tuple(items))


def of_type(kind: str, event: Event) -> Event:
    """The event with this type; impressions also contain unusual ids."""
    return as_impression(event, [event.item_id, *ODD_IDS]) if kind == IMPRESSION else replace(event, type=kind)


_numbers = count()


def fresh_user() -> str:
    """An unused user id, so that examples can share a store."""
    return f"user-{next(_numbers)}"


def logs(max_size: int = 40) -> st.SearchStrategy[list[Event]]:
    """Events of a user, with duplicates, late, unknown and weightless ones."""
    plain = st.builds(
        Event,
        event_id=st.integers(0, 30).map("e{}".format),
        user_id=st.just("u"),
        item_id=st.integers(0, KNOWN_ITEMS + 2).map("item{}".format),
        type=st.just("click"),
        timestamp_us=TIMES_US,
        id_time_us=st.none() | st.integers(0, 40).map(lambda second: START_US + second * 1_000_000),
        value=st.none() | st.floats(-1e6, 1e6),
        recommendation_id=st.none() | st.just("r1"),
        order_id=st.none() | st.sampled_from(["o1", "", "o 2", "ä"]),
    )
    kinds = st.sampled_from([*TYPES, *WITH_CODES])
    event = st.builds(lambda event, kind: replace(event, type=kind[0], codes=kind[1]), plain, kinds)
    shown = st.integers(0, KNOWN_ITEMS + 60).map("item{}".format) | st.sampled_from(ODD_IDS)
    impression = st.builds(as_impression, plain, st.lists(shown, min_size=1, max_size=50))
    return st.lists(event | event | event | impression, max_size=max_size)


def events_of(users: int, each: int, prefix: str = "e") -> list[Event]:
    """Events of some users, `each` per user, in random order; some are impressions."""
    rng = random.Random(prefix)
    numbers = [user for user in range(users) for _ in range(each)]
    rng.shuffle(numbers)
    events = [
        click(f"{prefix}{number}", f"user{user}", item=rng.randrange(15), timestamp_us=rng.randrange(100))
        for number, user in enumerate(numbers)
    ]
    events[::2] = [replace(event, order_id=f"o{number // 3}") for number, event in enumerate(events[::2])]
    shown = [*(f"item{item}" for item in range(80)), *ODD_IDS]
    return [as_impression(event, rng.sample(shown, 10)) if rng.random() < 0.2 else event for event in events]


def user_ids_of(events: Sequence[Event]) -> list[str]:
    return sorted({event.user_id for event in events})


def make_newer() -> Generation:
    """A generation with other items, codes and rates, and with soft codes."""
    return make_generation(tag=b"gen two\0", rates=(0.1, 0.7), codebooks=4, items=KNOWN_ITEMS + 2, seed=1, soft=True)


def make_warm(before: Generation) -> Generation:
    """A generation that extends another one by some items."""
    (known, codebooks), rng = before.codes.shape, np.random.default_rng(5)
    new = [f"item{number}" for number in range(known, known + NEW_ITEMS)]
    codes = rng.integers(0, CODEWORDS, (NEW_ITEMS, codebooks), dtype=np.uint8)
    shares = rng.dirichlet(np.ones(CODEWORDS), codes.shape).astype(np.float32)
    return replace(
        before,
        tag=b"gen warm",
        item_index=dict(before.item_index) | {item_id: known + place for place, item_id in enumerate(new)},
        codes=np.concatenate([before.codes, codes]),
        shares=None if before.shares is None else np.concatenate([before.shares, shares]),
    )


def shared_event(number: int) -> Event:
    """The event of this number, appended by several processes; 4 of 5 are of two hot users."""
    user_id = HOT_USERS[number % 2] if number % 5 else f"cold{number % 200}"
    return click(f"e{number}", user_id, item=number % 14, timestamp_us=START_US + number * 997_001 % 10**9)
