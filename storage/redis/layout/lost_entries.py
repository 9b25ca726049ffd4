"""The field "lost" of PREFIX:meta: entries that are missing, and whose loss nobody has accepted.

It begins with the time when a loss was last accepted: an acceptance voids what was noted before, also what is noted a
moment later by a process that does not know of it yet.
"""

import json
from collections.abc import Mapping

LOST_FIELD = "lost"
META = "meta"  # in the place of a partition: the other fields of PREFIX:meta were gone, and logs were there
EVICTED = "evicted"  # in the place of a partition: a server has thrown away keys, and nobody knows which


def encode_lost(lost: Mapping[str, str], accepted_ms: int) -> str:
    """Return the value of the field for missing entries by partition."""
    return f"{accepted_ms} {json.dumps(lost)}"


def decode_lost(value: bytes | None, accepted_ms: int) -> dict[str, str]:
    """Return the missing entries by partition, unless a loss was accepted since they were noted."""
    noted_ms, _, lost = (value or b"").decode().partition(" ")
    found: dict[str, str] = json.loads(lost) if noted_ms == str(accepted_ms) else {}
    return found
