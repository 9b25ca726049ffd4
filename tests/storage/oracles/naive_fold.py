"""Oracle for states, written plainly and independently of ``storage.state.fold``.

Everything decays in place at every step, in float64; ids are a set; nothing is bounded.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from storage.state.event import CodesByTag, Event, LogRecord
from storage.state.generation import Generation
from storage.state.layout import recent_items


@dataclass
class NaiveUser:
    generation: Generation
    ids: set[str] = field(default_factory=set)
    bins: dict[tuple[int, int, int], float] = field(default_factory=dict)
    steps: int = 0
    last: tuple[int, int] | None = None  # (row, timestamp_us)
    last_codes: list[int] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    stepped: list[int] = field(default_factory=list)  # rows, oldest first; a late one before the last item
    unlearned: set[str] = field(default_factory=set)  # items that the generation lacks
    shown: dict[int, int] = field(default_factory=dict)  # row -> place, of 56
    shown_when: dict[int, tuple[int, int]] = field(default_factory=dict)  # row -> newest second and count

    def receive(self, event: Event) -> tuple[bool, bool, bool]:
        """Process an event; return duplicate, unknown_item, late."""
        if event.event_id in self.ids:
            return True, False, False
        self.ids.add(event.event_id)
        touched = event.items if event.type == "impression" else [event.item_id]
        self.unlearned |= {item_id for item_id in touched if item_id not in self.generation.item_index}
        if event.type == "impression":
            for item_id in event.items:
                self.show(self.generation.item_index.get(item_id, name_of_cold(item_id)), event.timestamp_us)
            return False, False, False
        row = self.generation.item_index.get(event.item_id)
        codes = brought_codes(self.generation, event.codes) if row is None else self.generation.codes[row].tolist()
        if codes is None:
            return False, True, False
        shares: dict[tuple[int, ...], float] = dict.fromkeys(enumerate(codes), 1.0)
        if row is None:
            row = name_of_cold(event.item_id)
        elif self.generation.shares is not None:
            shares = {place: float(share) for place, share in np.ndenumerate(self.generation.shares[row])}
        if event.type not in self.generation.unseen_types:
            self.items.append(row)
        weight = self.generation.event_weights.get(event.type, 0)
        if weight <= 0:
            return False, False, False
        self._step(shares, weight)
        self.shown.pop(row, None)
        self.shown_when.pop(row, None)
        if self.last is not None and event.timestamp_us < self.last[1]:
            self.stepped.insert(-1, row)
            return False, False, True
        self.stepped.append(row)
        self.last, self.last_codes = (row, event.timestamp_us), codes
        return False, False, False

    def show(self, row: int, time_us: int) -> None:
        """Count an impression of the item; with 56 others, one of the oldest is dropped."""
        second = min(max(time_us // 10**6, 1), 2**32 - 1)
        if row not in self.shown:
            free = set(range(56)) - set(self.shown.values())
            if not free:
                given_up = min(self.shown, key=lambda one: (self.shown_when[one][0], self.shown[one]))
                free = {self.shown.pop(given_up)}
                del self.shown_when[given_up]
            self.shown[row] = min(free)
        newest, count = self.shown_when.get(row, (0, 0))
        self.shown_when[row] = max(newest, second), min(count + 1, 255)

    def _step(self, shares: dict[tuple[int, ...], float], weight: float) -> None:
        self.steps += 1
        for rate, book, word in self.bins:
            self.bins[rate, book, word] *= float(np.exp(-self.generation.decay_rates[rate]))
        for rate in range(len(self.generation.decay_rates)):
            for (book, word), share in shares.items():
                self.bins[rate, book, word] = self.bins.get((rate, book, word), 0.0) + weight * share

    def histogram(self) -> NDArray[np.float64]:
        rates, books = len(self.generation.decay_rates), self.generation.codes.shape[1]
        dense = np.zeros((rates, books, self.generation.codewords))
        for cell, amount in self.bins.items():
            dense[cell] = amount
        return dense


def brought_codes(generation: Generation, brought: CodesByTag) -> list[int] | None:
    """The first codes, one per codebook of the generation, if they are valid codewords."""
    for tag, codes in brought:
        if tag == generation.tag and len(codes) == generation.codes.shape[1]:
            return list(codes) if max(codes) < generation.codewords else None
    return None


def name_of_cold(item_id: str) -> int:
    """30 bits of a hash and a marker bit above them."""
    bits = blake2b(item_id.encode(), digest_size=4).digest()
    return 2**30 + int.from_bytes(bits, "little") % 2**30


def fold(generation: Generation, log: Iterable[LogRecord]) -> NaiveUser:
    """Fold a log without corrections."""
    user = NaiveUser(generation)
    for event in log:
        assert isinstance(event, Event)
        user.receive(event)
    return user


def assert_state_is(value: bytes | None, expected: NaiveUser) -> None:
    """Assert that the encoded state equals the naive fold; histograms within 1e-5 of their row's sum."""
    if not expected.ids:
        assert value is None
        return
    assert value is not None
    generation = expected.generation
    state = generation.decode(value)
    assert state["event_count"] == len(expected.ids)
    assert state["has_unlearned"] == bool(expected.unlearned)
    assert state["n"] == expected.steps
    assert recent_items(state).tolist() == [*dict.fromkeys(expected.items[::-1])][:24]
    newest = expected.stepped[::-1][: generation.stepped_items]
    assert state["stepped_items"].tolist() == newest + [-1] * (generation.stepped_items - len(newest))
    shown = zip(*(state[f"shown_{name}"].tolist() for name in ("items", "times_s", "counts")), strict=True)
    assert {row: (second, count) for row, second, count in shown if second} == expected.shown_when
    if expected.last is None:
        assert state["last_item"] == -1
    else:
        assert (state["last_item"], state["last_timestamp_us"]) == expected.last
        assert state["last_codes"].tolist() == expected.last_codes
    assert_histogram_is(generation.histograms(generation.decode_many([value]))[0], expected.histogram())


def assert_histogram_is(histogram: NDArray[np.float32], expected: NDArray[np.float64]) -> None:
    error = np.abs(histogram - expected).max(axis=-1)
    assert np.all(error <= 1e-5 * expected.sum(axis=-1))
