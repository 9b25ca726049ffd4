"""What a model makes its queries from, in rows of a catalogue."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.catalogue.live_catalogue import LiveCatalogue

# Log entries that a request folds if a state lacks them, in some 10 ms. A user whose state lacks more gets popular
# items for now.
MAX_MISSING = 500


@dataclass(frozen=True, slots=True)
class ModelInput:
    """What the model makes one user's query from.

    events        how many
    histogram     (R, B, W)  float32, the scale of each row is free
    last_item     row of the last item
    recent_items  (K,)       rows of the newest items
    """

    events: int
    histogram: NDArray[np.float32]
    last_item: int
    recent_items: NDArray[np.integer]


def model_inputs(states: NDArray[np.void], catalogue: LiveCatalogue) -> list[ModelInput | None]:
    """Return each user's input; None for a user who has not stepped, or only with items that are not known here.

    states  (Q,) decoded
    """
    windows, lasts = states["stepped_items"], states["last_item"]
    known = catalogue.in_state(windows)
    if known is not windows:  # the last item is one of them
        windows, lasts = known, catalogue.in_state(lasts)
    inputs: list[ModelInput | None] = []
    for state, window, last in zip(states, windows, lasts, strict=True):
        if last < 0:  # also where another process has just given codes to an item
            last = next((row for row in window if row >= 0), -1)
        # the bins as they are: the scale of a row is free
        inputs.append(ModelInput(int(state["n"]), state["bins"], last, window) if last >= 0 else None)
    return inputs
