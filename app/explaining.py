"""Why an item is recommended: what its score is the sum of, and which recent items have the same codewords."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.catalogue import Catalogue, Rows
from app.schemas import Explanation, HistoryCodeword, RecentItem, TargetCodeword
from model.engine import Engine, Queries
from storage.state import Generation

SHOWN = 3  # codewords, and recent items, of each kind


class Asker(NamedTuple):
    """Whose recommendations are explained.

    query      one
    lifting    (K,)       rows of the items that lift others, as the query has them; -1 for none
    recent     (M,)       rows of all that may have shared codewords
    histogram  (R, B, W)  None where none is asked
    """

    query: Queries
    lifting: NDArray[np.integer]
    recent: Rows
    histogram: NDArray[np.float32] | None


class Explainer:
    """Explains the answers of one generation."""

    def __init__(self, generation: Generation, catalogue: Catalogue, engine: Engine) -> None:
        self._history_codes = engine.history_codes
        self._slowest = int(np.argmin(generation.decay_rates))
        self._catalogue = catalogue
        self._engine = engine

    def explain(self, asker: Asker, rows: Rows) -> list[Explanation]:
        """Of each of the items, in order."""
        parts = self._engine.explain(asker.query, rows)
        codes, strongest = self._engine.target_codes[rows], np.argsort(-parts.codewords, axis=1, kind="stable")
        recent = self._recent(asker, rows, parts.codewords, parts.lifts)
        history = self._history(asker.histogram, rows)
        follows, totals = parts.lifts.sum(axis=1), parts.codewords.sum(axis=1)
        shown = [
            [TargetCodeword(codebook=book, codeword=int(own[book]), adds=float(adds[book])) for book in books[:SHOWN]]
            for books, own, adds in zip(strongest.tolist(), codes, parts.codewords, strict=True)
        ]
        return [
            {
                "codewords": best,
                "other_codewords": float(total) - sum(word["adds"] for word in best),
                "bias": float(bias),
                "follows": float(lift),
                "history": of_history,
                "recent_items": of_recent,
            }
            for best, total, bias, lift, of_history, of_recent in zip(
                shown, totals, parts.bias, follows, history, recent, strict=True
            )
        ]

    def _history(self, histogram: NDArray[np.float32] | None, rows: Rows) -> list[list[HistoryCodeword]]:
        """Of each item the history codewords that the user's history has most, at the slowest rate."""
        if histogram is None:
            return [[] for _ in rows]
        bins, codes = histogram[self._slowest], self._history_codes[rows]  # (B, W), (k, B)
        shares = (bins / bins.sum(axis=1, keepdims=True))[np.arange(len(bins)), codes]
        most = np.argsort(-shares, axis=1, kind="stable")[:, :SHOWN].tolist()
        return [
            [
                HistoryCodeword(codebook=book, codeword=int(own[book]), share=float(share[book]))
                for book in books
                if share[book] > 0
            ]
            for books, own, share in zip(most, codes, shares, strict=True)
        ]

    def _recent(
        self, asker: Asker, rows: Rows, adding: NDArray[np.float32], lifts: NDArray[np.float32]
    ) -> list[list[RecentItem]]:
        """Of each item the user's items that have a codeword in common with it or that it has followed."""
        lifting = asker.lifting[: lifts.shape[1]]
        recent = np.array(_distinct([*lifting.tolist(), *asker.recent.tolist()]), np.int64)
        targets, histories = self._engine.target_codes, self._history_codes
        same = targets[rows][:, None] == targets[recent]  # (k, M, B')
        adds = np.where(same, adding[:, None], np.float32(0)).sum(axis=2)
        shared = same.sum(axis=2)
        of_history = (histories[rows][:, None] == histories[recent]).sum(axis=2)
        follows = (lifts[:, None] * (recent[:, None] == lifting)).sum(axis=2)  # (k, M)
        related = (shared + of_history > 0) | (follows > 0)
        most = np.lexsort((-shared, -(adds + follows), ~related), axis=1)[:, :SHOWN].tolist()
        return [
            [
                self._recent_item(int(recent[place]), shared[n, place], of_history[n, place], adds[n, place], lift)
                for place in places
                if related[n, place]
                for lift in [follows[n, place]]
            ]
            for n, places in enumerate(most)
        ]

    def _recent_item(
        self, row: int, shared: np.integer, of_history: np.integer, adds: np.floating, follows: np.floating
    ) -> RecentItem:
        return {
            **self._catalogue.named_item(row),
            "shared": int(shared),
            "shared_history": int(of_history),
            "adds": float(adds),
            "follows": float(follows),
        }


def _distinct(rows: Iterable[int]) -> list[int]:
    """In the order given, without those that are none."""
    return list(dict.fromkeys(row for row in rows if row >= 0))
