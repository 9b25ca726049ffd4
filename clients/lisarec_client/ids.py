"""Ids: event ids, the visitor's id in a cookie, and the checks that the service makes too."""

import math
import os
import re
import time
from uuid import UUID

ID = re.compile(r"[A-Za-z0-9_.:@-]{1,128}")
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


def require_id(name: str, value: object) -> None:
    """Raise ValueError unless the value is an id that the service accepts."""
    if not isinstance(value, str) or not ID.fullmatch(value) or value in (".", ".."):
        raise ValueError(f"{name} has to be 1 to 128 letters, digits or _.:@- and neither . nor ..")


def require_number(name: str, value: object) -> None:
    """Raise ValueError unless the value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} has to be a finite number")


def user_path(user_id: str, *rest: str) -> str:
    """Return the path of a user, or of something of a user's. Ids need no escaping in a path."""
    require_id("user_id", user_id)
    return "/".join(("/v1/users", user_id, *rest))
