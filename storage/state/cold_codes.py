"""Codes of items that a generation's model has not learned, stored in the events that step with them.

An event on such an item may contain codes for one or more generations. A generation that has learned the item uses its
own codes. Any other generation uses the codes with its tag, and without such codes the event does not step. So the
meaning of an event does not depend on when a process learned which codes.

A state refers to such an item by a hash of its id, from FIRST_COLD_ROW on, because no row of the item is the same in
all processes.
"""

from hashlib import blake2b

FIRST_COLD_ROW = 1 << 30  # exceeds the rows of any catalogue


def cold_row(item_id: str) -> int:
    """Return the row that refers to the item in states, the same in all processes; collisions are rare."""
    hashed = int.from_bytes(blake2b(item_id.encode(), digest_size=4).digest(), "little")
    return FIRST_COLD_ROW | hashed & (FIRST_COLD_ROW - 1)
