"""Codes of items that a generation's model has not learned, in the entries of the log that step with them.

An entry of such an item may have codes behind its type, for one generation or several:

  TYPE!TAG CODES!TAG CODES     TAG 16 hex digits, CODES two for each history codebook, without the space

No client can post that: types from outside have no "!". Where a generation has learned the item, its own codes count;
else those that stand there for it; else the event does not step. So what an event means stands in the event, for
everybody who ever folds it, and does not depend on who had heard of which codes by when.

A state names such an item by a hash of its id, from COLD on, as there is no row that all processes would agree on.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

MARK = "!"
COLD = 1 << 30  # no catalogue has as many rows
TAG_DIGITS = 16


def cold_row(item_id: str) -> int:
    """What stands for the item in a state: from COLD on, the same everywhere; two items rarely share it."""
    return COLD | int.from_bytes(blake2b(item_id.encode(), digest_size=4).digest(), "little") & (COLD - 1)


def plain_type(event_type: str) -> str:
    """What was posted."""
    return event_type.partition(MARK)[0] if MARK in event_type else event_type


def with_codes(event_type: str, codes: Iterable[tuple[bytes, NDArray[np.uint8]]]) -> str:
    """The type with an item's codes (B,) for the generations of those tags behind it."""
    return MARK.join([event_type, *(tag.hex() + own.tobytes().hex() for tag, own in codes)])


def codes_in(event_type: str, tag: bytes, codebooks: int, codewords: int) -> NDArray[np.uint8] | None:
    """The codes (B,) that stand behind a type for that generation; None without any, or where they do not fit it."""
    wanted = tag.hex()
    for part in event_type.split(MARK)[1:]:
        if part.startswith(wanted) and len(part) == TAG_DIGITS + 2 * codebooks:
            try:
                codes = np.frombuffer(bytes.fromhex(part[TAG_DIGITS:]), np.uint8)
            except ValueError:
                return None
            return codes if len(codes) == codebooks and int(codes.max(initial=0)) < codewords else None
    return None
