"""Codes of items that a generation's model has not learned, in the events that step with them.

An event on such an item may bring codes, for one generation or several. A generation that has learned the item uses its
own codes; another one uses those of its tag; without either the event does not step. So the meaning of an event stands
in the event, and does not depend on when a process learned which codes.

A state names such an item by a hash of its id, from FIRST_COLD_ROW on, because there is no row that all processes
agree on.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from storage.state.event import CodesByTag

FIRST_COLD_ROW = 1 << 30  # no catalogue has as many rows


def cold_row(item_id: str) -> int:
    """Return the row that a state has for the item, the same in all processes; two items rarely share it."""
    hashed = int.from_bytes(blake2b(item_id.encode(), digest_size=4).digest(), "little")
    return FIRST_COLD_ROW | hashed & (FIRST_COLD_ROW - 1)


def codes_for(tag: bytes, codes: CodesByTag, codebooks: int, codewords: int) -> NDArray[np.uint8] | None:
    """Return the codes (B,) for the generation of that tag, or None without any that fit it."""
    for of_tag, own in codes:
        if of_tag == tag and len(own) == codebooks:
            row = np.frombuffer(own, np.uint8)
            return row if int(row.max(initial=0)) < codewords else None
    return None
