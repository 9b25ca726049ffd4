"""Event ids, the visitor id in a cookie, and the paths of users."""

import os
import re
import time
from urllib.parse import quote
from uuid import UUID

from .arguments import require_id

VISITOR = re.compile(r"visitor-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def visitor_in(cookie: str | None) -> str | None:
    """Return the visitor id in the `lisarec` cookie that /client.js sets, or None if the value is not a visitor id.

    Always check the cookie with this function: visitors can write anything into their cookies. An unchecked value could
    be another user's id, and would show that user's recommendations or merge the two users.
    """
    return cookie if cookie and VISITOR.fullmatch(cookie) else None


def new_event_id() -> str:
    """Return a UUIDv7 (RFC 9562, section 5.7): 48 bits of Unix milliseconds, then 74 random bits."""
    random_bits = int.from_bytes(os.urandom(10), "big")
    version_and_random = 0x7000 | (random_bits >> 64) & 0x0FFF
    variant_and_random = 1 << 63 | random_bits & (1 << 62) - 1
    return str(UUID(int=time.time_ns() // 1_000_000 << 80 | version_and_random << 64 | variant_and_random))


def user_path(user_id: str, *rest: str) -> str:
    """Return the path of a user, or of a resource below it."""
    require_id("user_id", user_id)
    return "/".join(("/v1/users", *(quote(part, safe="") for part in (user_id, *rest))))
