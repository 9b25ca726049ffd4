"""UUIDv7: ids that sort by the time they were made (RFC 9562, section 5.7)."""

import os
import time
from uuid import UUID


def uuid7() -> str:
    """Return a fresh UUIDv7: 48 bits of Unix milliseconds, then 74 random bits, version and variant."""
    time_ms = time.time_ns() // 1_000_000
    random = int.from_bytes(os.urandom(10), "big")
    version_and_random = 0x7000 | (random >> 64) & 0x0FFF
    variant_and_random = 1 << 63 | random & (1 << 62) - 1
    return str(UUID(int=time_ms << 80 | version_and_random << 64 | variant_and_random))
