"""Why an item is recommended: what its score is the sum of, and which recent items have the same codewords."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from app.catalogue import Catalogue, Rows, gains_of
from app.schemas import Explanation, NamedItem, RecentItem
from model.engine import Engine, Parts, Queries
from model.scan import Boosts
from storage.state import Generation

NO_ROWS: Rows = np.zeros(0, np.int64)
NO_BINS = np.zeros((0, 0), np.float32)
SHOWN = 3  # codewords, and recent items, of each kind


class Asker(NamedTuple):
    """Whose recommendations are explained.

    query      one
    lifting    (K,)       rows of the items that lift others, as the query has them; -1 for none
    recent     (M,)       rows of all that may have shared codewords
    histogram  (R, B, W)  None where none is asked
    boosts     what the request adds to scores
    """

    query: Queries
    lifting: NDArray[np.integer]
    recent: Rows
    histogram: NDArray[np.float32] | None
    boosts: Boosts | None


class _Why(NamedTuple):
    """Of k items.

    books, words, adding                  (k, 3)     their strongest target codewords, and what these add
    others                                (k,)       what their other codewords add
    follows                               (k,)       what is added since they have followed recent items
    history_books, history_words, shares  (k, 3)     their history codewords that the history has most
    recent                                (k, 3)     places of the recent items that add most, -1 for none
    shared                                (k, 3, 2)  how many target and history codewords they share with these
    gains                                 (k, 3, 2)  what the shared target codewords and following them add
    """

    books: NDArray[np.int64]
    words: NDArray[np.int64]
    adding: NDArray[np.float32]
    others: NDArray[np.float64]
    follows: NDArray[np.float32]
    history_books: NDArray[np.int64]
    history_words: NDArray[np.int64]
    shares: NDArray[np.float32]
    recent: NDArray[np.int64]
    shared: NDArray[np.int64]
    gains: NDArray[np.float64]


class Explainer:
    """Explains the answers of one generation."""

    def __init__(self, generation: Generation, catalogue: Catalogue, engine: Engine) -> None:
        self._history_codes = engine.history_codes
        self._slowest = int(np.argmin(generation.decay_rates))
        self._catalogue = catalogue
        self._engine = engine
        nothing = Parts(np.zeros((0, 0), np.float32), np.zeros(0, np.float32), np.zeros((0, 0), np.float32))
        self._why(NO_ROWS, nothing, NO_ROWS, NO_ROWS, None)  # compiled before the first request waits for it

    def explain(self, asker: Asker, rows: Rows) -> list[Explanation]:
        """Of each of the items, in order."""
        parts = self._engine.explain(asker.query, rows)
        lifting = np.asarray(asker.lifting[: parts.lifts.shape[1]], np.int64)
        recent = np.array(_distinct([*lifting.tolist(), *asker.recent.tolist()]), np.int64)
        why = self._why(rows, parts, recent, lifting, asker.histogram)
        names = self._catalogue.named_items(recent)
        of_each = zip(parts.bias.tolist(), *(part.tolist() for part in why), strict=True)
        explanations: list[Explanation] = [
            {
                "codewords": [
                    {"codebook": book, "codeword": word, "adds": adds}
                    for book, word, adds in zip(books, words, adding, strict=True)
                ],
                "other_codewords": others,
                "bias": bias,
                "follows": follows,
                "history": [
                    {"codebook": book, "codeword": word, "share": share}
                    for book, word, share in zip(history_books, history_words, shares, strict=True)
                    if share > 0
                ],
                "recent_items": _recent_items(names, places, shared, gains),
            }
            for (
                bias,
                books,
                words,
                adding,
                others,
                follows,
                history_books,
                history_words,
                shares,
                places,
                shared,
                gains,
            ) in of_each
        ]
        if asker.boosts is not None:
            for explanation, gain in zip(explanations, gains_of(asker.boosts, rows).tolist(), strict=True):
                explanation["boost"] = gain
        return explanations

    def _why(
        self, rows: Rows, parts: Parts, recent: Rows, lifting: Rows, histogram: NDArray[np.float32] | None
    ) -> _Why:
        """What there is to say of k items in numbers."""
        bins = NO_BINS if histogram is None else histogram[self._slowest]
        count, books = len(rows), min(SHOWN, parts.codewords.shape[1])
        of_history = min(SHOWN, len(bins))
        why = _Why(
            books=np.empty((count, books), np.int64),
            words=np.empty((count, books), np.int64),
            adding=np.empty((count, books), np.float32),
            others=np.empty(count, np.float64),
            follows=np.empty(count, np.float32),
            history_books=np.empty((count, of_history), np.int64),
            history_words=np.empty((count, of_history), np.int64),
            shares=np.empty((count, of_history), np.float32),
            recent=np.empty((count, SHOWN), np.int64),
            shared=np.empty((count, SHOWN, 2), np.int64),
            gains=np.empty((count, SHOWN, 2), np.float64),
        )
        codes = self._engine.target_codes, self._history_codes
        _tell(*codes, rows, recent, lifting, parts.codewords, parts.lifts, np.ascontiguousarray(bins), why)
        return why


@numba.njit(cache=True, nogil=True)
def _tell(targets, histories, rows, recent, lifting, adding, lifts, bins, why):  # type: ignore[no-untyped-def]
    totals = np.zeros(len(bins))
    for book in range(len(bins)):
        for word in range(bins.shape[1]):
            totals[book] += bins[book, word]
    order, shares = np.empty(adding.shape[1], np.int64), np.empty(len(bins), np.float32)
    history_order = np.empty(len(bins), np.int64)
    for item in range(len(rows)):
        _strongest_first(adding[item], order)
        why.others[item], why.follows[item] = 0, 0
        for place in range(len(order)):
            if place < why.books.shape[1]:
                why.books[item, place], why.adding[item, place] = order[place], adding[item, order[place]]
                why.words[item, place] = targets[rows[item], order[place]]
            else:
                why.others[item] += adding[item, order[place]]
        for lift in lifts[item]:
            why.follows[item] += lift
        for book in range(len(bins)):
            shares[book] = bins[book, histories[rows[item], book]] / totals[book]
        _strongest_first(shares, history_order)
        for place in range(why.shares.shape[1]):
            book = history_order[place]
            why.history_books[item, place], why.shares[item, place] = book, shares[book]
            why.history_words[item, place] = histories[rows[item], book]
        _relate(targets, histories, rows[item], recent, lifting, adding[item], lifts[item], why, item)


@numba.njit(nogil=True)
def _strongest_first(values, order):  # type: ignore[no-untyped-def]
    """Places of a few values, the largest first; ties as they stand."""
    for number in range(len(values)):
        place = number
        while place > 0 and values[order[place - 1]] < values[number]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = number


@numba.njit(nogil=True)
def _relate(targets, histories, row, recent, lifting, adding, lifts, why, item):  # type: ignore[no-untyped-def]
    most, shared, gains = why.recent[item], why.shared[item], why.gains[item]
    most[:] = -1
    for other in range(len(recent)):
        adds, same, of_history, follows = 0.0, 0, 0, 0.0
        for book in range(targets.shape[1]):
            if targets[row, book] == targets[recent[other], book]:
                adds += adding[book]
                same += 1
        for book in range(histories.shape[1]):
            of_history += histories[row, book] == histories[recent[other], book]
        for place in range(len(lifting)):
            if lifting[place] == recent[other]:
                follows += lifts[place]
        if same + of_history == 0 and follows <= 0:
            continue
        place = len(most)
        while place > 0 and (
            most[place - 1] < 0
            or gains[place - 1, 0] + gains[place - 1, 1] < adds + follows
            or (gains[place - 1, 0] + gains[place - 1, 1] == adds + follows and shared[place - 1, 0] < same)
        ):
            place -= 1
        for later in range(len(most) - 1, place, -1):
            most[later] = most[later - 1]
            shared[later], gains[later] = shared[later - 1], gains[later - 1]
        if place < len(most):
            most[place] = other
            shared[place, 0], shared[place, 1] = same, of_history
            gains[place, 0], gains[place, 1] = adds, follows


def _recent_items(
    names: Sequence[NamedItem], places: list[int], shared: list[list[int]], gains: list[list[float]]
) -> list[RecentItem]:
    """Of one item, by their places among the names."""
    return [
        {**names[place], "shared": same, "shared_history": of_history, "adds": adds, "follows": follows}
        for place, (same, of_history), (adds, follows) in zip(places, shared, gains, strict=True)
        if place >= 0
    ]


def _distinct(rows: Iterable[int]) -> list[int]:
    """In the order given, without those that are none."""
    return list(dict.fromkeys(row for row in rows if row >= 0))
