"""Why an item is recommended: what its score is the sum of, and which recent items have the same codewords."""

from collections.abc import Iterable
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from app.catalogue import Catalogue, Rows, gains_of
from app.schemas import Explanation, HistoryCodeword, RecentItem
from model.engine import Engine, Parts, Queries
from model.scan import Boosts
from storage.state import Generation

NO_ROWS: Rows = np.zeros(0, np.int64)
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


class Explainer:
    """Explains the answers of one generation."""

    def __init__(self, generation: Generation, catalogue: Catalogue, engine: Engine) -> None:
        self._history_codes = engine.history_codes
        self._slowest = int(np.argmin(generation.decay_rates))
        self._catalogue = catalogue
        self._engine = engine
        nothing = Parts(np.zeros((0, 0), np.float32), np.zeros(0, np.float32), np.zeros((0, 0), np.float32))
        self._related(NO_ROWS, NO_ROWS, NO_ROWS, nothing)  # compiled before the first request waits for it

    def explain(self, asker: Asker, rows: Rows) -> list[Explanation]:
        """Of each of the items, in order."""
        parts = self._engine.explain(asker.query, rows)
        strongest = np.argsort(-parts.codewords, axis=1, kind="stable").tolist()
        codes, adds = self._engine.target_codes[rows].tolist(), parts.codewords.tolist()
        follows = parts.lifts.sum(axis=1).tolist()
        history, recent = self._history(asker.histogram, rows), self._recent(asker, rows, parts)
        explanations = []
        for n, bias in enumerate(parts.bias.tolist()):
            best, others = strongest[n][:SHOWN], strongest[n][SHOWN:]
            explanation: Explanation = {
                "codewords": [{"codebook": book, "codeword": codes[n][book], "adds": adds[n][book]} for book in best],
                "other_codewords": sum([adds[n][book] for book in others]),
                "bias": bias,
                "follows": follows[n],
                "history": history[n],
                "recent_items": recent[n],
            }
            explanations.append(explanation)
        if asker.boosts is not None:
            for explanation, gain in zip(explanations, gains_of(asker.boosts, rows).tolist(), strict=True):
                explanation["boost"] = gain
        return explanations

    def _history(self, histogram: NDArray[np.float32] | None, rows: Rows) -> list[list[HistoryCodeword]]:
        """Of each item the history codewords that the user's history has most, at the slowest rate."""
        if histogram is None:
            return [[] for _ in rows]
        bins, codes = histogram[self._slowest], self._history_codes[rows]  # (B, W), (k, B)
        shares = (bins / bins.sum(axis=1, keepdims=True))[np.arange(len(bins)), codes]
        most = np.argsort(-shares, axis=1, kind="stable")[:, :SHOWN].tolist()
        return [
            [{"codebook": book, "codeword": own[book], "share": share[book]} for book in books if share[book] > 0]
            for books, own, share in zip(most, codes.tolist(), shares.tolist(), strict=True)
        ]

    def _recent(self, asker: Asker, rows: Rows, parts: Parts) -> list[list[RecentItem]]:
        """Of each item the user's items that have a codeword in common with it or that it has followed."""
        lifting = np.asarray(asker.lifting[: parts.lifts.shape[1]], np.int64)
        recent = np.array(_distinct([*lifting.tolist(), *asker.recent.tolist()]), np.int64)
        most, shared, gains = self._related(rows, recent, lifting, parts)
        places = most.tolist()
        names = {row: self._catalogue.named_item(row) for row in {row for of_item in places for row in of_item} - {-1}}
        return [
            [
                {**names[row], "shared": same, "shared_history": of_history, "adds": adds, "follows": follows}
                for row, (same, of_history), (adds, follows) in zip(of_item, its_shared, its_gains, strict=True)
                if row >= 0
            ]
            for of_item, its_shared, its_gains in zip(places, shared.tolist(), gains.tolist(), strict=True)
        ]

    def _related(
        self, rows: Rows, recent: Rows, lifting: Rows, parts: Parts
    ) -> tuple[Rows, NDArray[np.int64], NDArray[np.float64]]:
        """For each of k items the recent ones that add most, -1 for none.

        returns  rows (k, SHOWN), common target and history codewords (k, SHOWN, 2), what these and following add
        """
        most = np.empty((len(rows), SHOWN), np.int64)
        shared, gains = np.empty((len(rows), SHOWN, 2), np.int64), np.empty((len(rows), SHOWN, 2))
        codes = self._engine.target_codes, self._history_codes
        _relate(*codes, rows, recent, parts.codewords, parts.lifts, lifting, most, shared, gains)
        return most, shared, gains


@numba.njit(cache=True, nogil=True)
def _relate(  # type: ignore[no-untyped-def]
    targets, histories, rows, recent, adding, lifts, lifting, most, shared, gains
):
    for item in range(len(rows)):
        most[item] = -1
        for other in range(len(recent)):
            adds, same, of_history, follows = 0.0, 0, 0, 0.0
            for book in range(targets.shape[1]):
                if targets[rows[item], book] == targets[recent[other], book]:
                    adds += adding[item, book]
                    same += 1
            for book in range(histories.shape[1]):
                of_history += histories[rows[item], book] == histories[recent[other], book]
            for place in range(len(lifting)):
                if lifting[place] == recent[other]:
                    follows += lifts[item, place]
            if same + of_history == 0 and follows <= 0:
                continue
            place = most.shape[1]
            while place > 0 and (
                most[item, place - 1] < 0
                or gains[item, place - 1, 0] + gains[item, place - 1, 1] < adds + follows
                or (
                    gains[item, place - 1, 0] + gains[item, place - 1, 1] == adds + follows
                    and shared[item, place - 1, 0] < same
                )
            ):
                place -= 1
            for later in range(most.shape[1] - 1, place, -1):
                most[item, later] = most[item, later - 1]
                shared[item, later], gains[item, later] = shared[item, later - 1], gains[item, later - 1]
            if place < most.shape[1]:
                most[item, place] = recent[other]
                shared[item, place, 0], shared[item, place, 1] = same, of_history
                gains[item, place, 0], gains[item, place, 1] = adds, follows


def _distinct(rows: Iterable[int]) -> list[int]:
    """In the order given, without those that are none."""
    return list(dict.fromkeys(row for row in rows if row >= 0))
