"""Ids: event ids, the visitor's id in a cookie, and users in paths."""

import os
import re
import time
from uuid import UUID

from .arguments import require_id

VISITOR = re.compile(r"visitor-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def visitor_in(cookie: str | None) -> str | None:
    """Return the visitor's id in the cookie `lisarec` that /client.js sets; None where it has no such id.

    Visitors can write anything into their cookies. A shop that used the value unchecked would show one user's
    recommendations to another, or merge one into another.
    """
    return cookie if cookie and VISITOR.fullmatch(cookie) else None


def new_event_id() -> str:
    """Return a UUIDv7 (RFC 9562, section 5.7): 48 bits of Unix milliseconds, then 74 random ones."""
    random_bits = int.from_bytes(os.urandom(10), "big")
    version_and_random = 0x7000 | (random_bits >> 64) & 0x0FFF
    variant_and_random = 1 << 63 | random_bits & (1 << 62) - 1
    return str(UUID(int=time.time_ns() // 1_000_000 << 80 | version_and_random << 64 | variant_and_random))


def user_path(user_id: str, *rest: str) -> str:
    """Return the path of a user, or of something of a user's. Ids need no escaping in a path."""
    require_id("user_id", user_id)
    return "/".join(("/v1/users", user_id, *rest))
