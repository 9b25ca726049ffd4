"""Codes of items that a generation's model has not learned, in the entries of the log that step with them.

An entry of such an item may have codes behind its type, for one generation or several:

  TYPE!TAG CODES!TAG CODES     TAG 16 hex digits, CODES two for each history codebook, without the space

No client can post that: types from outside have no "!". A generation that has learned the item uses its own codes;
another one uses those of its tag; without either the event does not step. So the meaning of an event stands in the
event, and does not depend on when a process learned which codes.

A state names such an item by a hash of its id, from FIRST_COLD_ROW on, because there is no row that all processes
agree on.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

MARK = "!"
FIRST_COLD_ROW = 1 << 30  # no catalogue has as many rows
TAG_DIGITS = 16


def cold_row(item_id: str) -> int:
    """Return the row that a state has for the item, the same in all processes; two items rarely share it."""
    hashed = int.from_bytes(blake2b(item_id.encode(), digest_size=4).digest(), "little")
    return FIRST_COLD_ROW | hashed & (FIRST_COLD_ROW - 1)


def plain_type(event_type: str) -> str:
    """Return the type as it was posted."""
    return event_type.partition(MARK)[0] if MARK in event_type else event_type


def with_codes(event_type: str, codes: Iterable[tuple[bytes, NDArray[np.uint8]]]) -> str:
    """Return the type followed by an item's codes (B,), for the generations of those tags."""
    return MARK.join([event_type, *(tag.hex() + own.tobytes().hex() for tag, own in codes)])


def codes_in(event_type: str, tag: bytes, codebooks: int, codewords: int) -> NDArray[np.uint8] | None:
    """Return the codes (B,) that follow a type for that generation, or None without any that fit it."""
    wanted = tag.hex()
    for part in event_type.split(MARK)[1:]:
        if part.startswith(wanted) and len(part) == TAG_DIGITS + 2 * codebooks:
            try:
                codes = np.frombuffer(bytes.fromhex(part[TAG_DIGITS:]), np.uint8)
            except ValueError:
                return None
            return codes if len(codes) == codebooks and int(codes.max(initial=0)) < codewords else None
    return None
