"""Model inputs: each user's decoded state, with its items as rows of a catalogue."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.catalogue.live_catalogue import LiveCatalogue

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


def model_inputs(states: NDArray[np.void], catalogue: LiveCatalogue) -> list[ModelInput | None]:
    """Return each user's input; None for a user with no stepped items in this catalogue.

    states  (Q,) decoded
    """
    windows, lasts = states["stepped_items"], states["last_item"]
    known = catalogue.rows_of_state_items(windows)
    if known is not windows:  # the window includes the last item
        windows, lasts = known, catalogue.rows_of_state_items(lasts)
    inputs: list[ModelInput | None] = []
    # bins are not rescaled, because the scale of a row is free
    for events, bins, window, last in zip(states["n"].tolist(), states["bins"], windows, lasts.tolist(), strict=True):
        if last < 0:  # also if another process has just assigned codes to an item
            last = next((row for row in window.tolist() if row >= 0), -1)
        inputs.append(ModelInput(events, bins, last, window) if last >= 0 else None)
    return inputs
