"""The items that a served state remembers as seen, which the seen rule `recent` leaves out."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

RECENT_ITEMS = 24


def newest_seen(seen: NDArray[Any]) -> NDArray[Any]:
    """Return the newest 24 different ones of the seen items, both oldest first."""
    if len(seen) <= RECENT_ITEMS:
        return seen
    newest_first = seen[::-1]
    places = np.sort(np.unique(newest_first, return_index=True)[1])
    return newest_first[places[:RECENT_ITEMS]][::-1]
