"""Model inputs: each user's decoded state, with its items as rows of a catalogue."""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from app.catalogue.live_catalogue import LiveCatalogue
from storage.state.layout import State

# The largest number of log entries that a request folds if its state lacks them, which takes about 10 ms. A user whose
# state lacks more gets popular items until the state has caught up.
MAX_MISSING_EVENTS = 500


@dataclass(slots=True)
class ModelInput:
    """The model's input for one user's query.

    events        number of weighted events
    histogram     (R, B, W)  float32, the scale of each row is free
    last_item     row of the last item
    recent_items  (K,)       rows of the newest items
    """

    events: int
    histogram: NDArray[np.float32]
    last_item: int
    recent_items: NDArray[np.integer]


class ModelInputs(NamedTuple):
    """The model's inputs of Q users, by the fields of `ModelInput`; a last item of -1 stands for no input.

    events        (Q,)
    histograms    (Q, R, B, W)  float32
    last_items    (Q,)
    recent_items  (Q, K)
    seen_items    (Q, n)  rows of the newest items seen, in any order; -1 for none and for items unknown here
    """

    events: NDArray[np.integer]
    histograms: NDArray[np.float32]
    last_items: NDArray[np.integer]
    recent_items: NDArray[np.integer]
    seen_items: NDArray[np.integer]

    @classmethod
    def of(cls, states: NDArray[np.void], catalogue: LiveCatalogue) -> Self:
        """Return the inputs of (Q,) decoded states; a user with no stepped items in this catalogue has none."""
        windows, lasts = states["stepped_items"], states["last_item"]
        known, seen = catalogue.rows_of_state_items(windows), catalogue.rows_of_state_items(states["recent_items"])
        if known is not windows:  # the window includes the last item
            windows, lasts = known, catalogue.rows_of_state_items(lasts)
        if min(lasts.tolist(), default=0) < 0:  # also if another process has just assigned codes to an item
            newest_known = windows[np.arange(len(windows)), (windows >= 0).argmax(axis=1)]
            lasts = np.where(lasts < 0, newest_known, lasts)
        # bins are not rescaled, because the scale of a row is free
        return cls(states["n"], states["bins"], lasts, windows, seen)

    def of_user(self, place: int) -> ModelInput | None:
        """Return the input of the user at that position; None for a user with no stepped items in this catalogue."""
        events, histograms, last_items, recent_items, _ = self
        if (last_item := int(last_items[place])) < 0:
            return None
        return ModelInput(int(events[place]), histograms[place], last_item, recent_items[place])

    def of_users(self, places: NDArray[np.integer]) -> Self:
        """Return the inputs of some users, in this order."""
        events, histograms, *items = self
        return type(self)(events[places], histograms[places], *(rows[places] for rows in items))


def model_input_of(state: State, catalogue: LiveCatalogue) -> ModelInput | None:
    """Return the input of one user's decoded state, as `ModelInputs.of_user` does."""
    return ModelInputs.of(np.array([state]), catalogue).of_user(0)
