"""The field "lost" of PREFIX:meta: missing entries whose loss is not accepted.

It begins with the time when a loss was last accepted. An acceptance invalidates earlier notes, including those written
a moment later by a process that does not know of it yet.
"""

import json
from collections.abc import Mapping

LOST_FIELD = "lost"
META = "meta"  # instead of a partition: the other fields of PREFIX:meta were missing, but logs existed
EVICTED = "evicted"  # instead of a partition: a server has evicted unknown keys


def encode_lost(lost: Mapping[str, str], accepted_ms: int) -> str:
    """Return the value of the field for missing entries by partition."""
    return f"{accepted_ms} {json.dumps(lost)}"


def decode_lost(value: bytes | None, accepted_ms: int) -> dict[str, str]:
    """Return the missing entries by partition, unless a loss was accepted since they were noted."""
    noted_ms, _, lost = (value or b"").decode().partition(" ")
    found: dict[str, str] = json.loads(lost) if noted_ms == str(accepted_ms) else {}
    return found
