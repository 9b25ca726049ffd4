"""Availability: items may be recommended while the shop has switched them on, and only between their dates."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from math import inf
from typing import cast

import numpy as np
from numpy.typing import NDArray

from app.catalogue.expressions.columns import NumberColumn
from app.catalogue.overrides.item_values import ItemValues
from app.catalogue.trained_catalogue import Rows
from model.inference import bitmap
from storage.records import ItemEntry

FROM, UNTIL = "available_from", "available_until"

LIMITS = np.iinfo(np.int64)


class Availability:
    """The items that may not be recommended, updated as time passes.

    switched_on  whether the shop has switched each item on, which is the default
    unavailable  (words,) bitmap of items that are switched off or outside their dates; always the same array
    """

    def __init__(self, values: ItemValues) -> None:
        self._properties = values.properties
        self.switched_on = values.switched_on
        self.unavailable = bitmap.empty(values.properties.rows)
        self._begin_us, self._end_us = -inf, inf  # no item changes between these times

    def update(self, rows: Rows) -> None:
        """Apply changes to distinct items."""
        is_allowed = self.allows(rows)
        bitmap.add(self.unavailable, rows[~is_allowed])
        bitmap.discard(self.unavailable, rows[is_allowed])

    def allows(self, rows: Rows) -> NDArray[np.bool_]:
        """Return which items may be recommended now: they are switched on, and this is between their dates."""
        return bitmap.has(self.switched_on.true, rows) & ~self._outside_dates(rows)

    def follow_time(self) -> None:
        """Apply the dates that have passed since the last call, or are ahead again because the clock was set back."""
        if not self._begin_us <= time.time() * 1e6 < self._end_us:
            self._begin_us, self._end_us = -inf, inf
            rows = np.arange(self._properties.rows)
            unavailable = ~self.switched_on.true
            bitmap.add(unavailable, rows[self._outside_dates(rows)])
            self.unavailable[:] = unavailable

    def _outside_dates(self, rows: Rows) -> NDArray[np.bool_]:
        """Return which items are outside their dates now, and narrow the times between which none of them changes."""
        now_us = time.time() * 1e6
        is_outside = np.zeros(len(rows), np.bool_)
        for name in (FROM, UNTIL):
            column = cast(NumberColumn | None, self._properties.column(name))
            if column is not None:
                dates, is_known = column.values[rows], bitmap.has(column.known, rows)
                is_ahead = is_known & (dates > now_us)
                is_past = is_known & ~is_ahead
                is_outside |= is_ahead if name == FROM else is_past
                self._begin_us = max(self._begin_us, dates[is_past].max(initial=LIMITS.min))
                self._end_us = min(self._end_us, dates[is_ahead].min(initial=LIMITS.max))
        return is_outside


def is_over(entry: ItemEntry) -> bool:
    """Return whether an item with these overrides cannot be recommended before they change."""
    until = entry.properties.get(UNTIL)
    return entry.available is False or (isinstance(until, datetime) and until <= datetime.now(UTC))
