"""The list that a page gets in place of the service's response."""

import itertools
import logging
import time
from collections.abc import Iterable

from .responses import Recommendations

QUIET_FOR_S = 60.0  # in an outage every page has the same reason

logger = logging.getLogger("lisarec")


class Fallback:
    """Makes lists of the shop's own items, and logs why: the same reason at most once a minute."""

    def __init__(self) -> None:
        self._quiet_until_s: dict[str, float] = {}  # by reason; replaced, never changed, because threads share it

    def recommend(self, failure: Exception, items: Iterable[str], k: int | None) -> Recommendations:
        """Return the first k of the items, or the first 10, after a failure."""
        self._log(str(failure) or type(failure).__name__)
        first = itertools.islice(items, 10 if k is None else k)
        return Recommendations([{"item_id": item_id} for item_id in first], "fallback")

    def _log(self, reason: str) -> None:
        now_s = time.monotonic()
        quiet = {logged: until_s for logged, until_s in self._quiet_until_s.items() if until_s > now_s}
        if reason not in quiet:
            logger.warning("returning the fallback: %s", reason)
            self._quiet_until_s = {**quiet, reason: now_s + QUIET_FOR_S}
