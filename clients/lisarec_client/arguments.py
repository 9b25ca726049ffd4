"""Argument checks: invalid arguments raise in the caller, before anything is sent."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import httpx

ID = re.compile(r"[ -~\xa0-\ud7ff\ue000-\U0010ffff]{1,128}")
NAME = re.compile(r"[A-Za-z0-9_.:@-]{1,128}")
NAMES = ("type", "recommendation_id")  # fields of an event that are no ids
MAX_SHOWN = 50  # items of an impression
KEY = re.compile(r"[!-~]+")  # the characters that an HTTP header can carry


def require_address(url: str) -> None:
    """Raise ValueError unless this is a base URL: http or https, a host, and optionally a path.

    The message does not show a URL with an @, which may have a password.
    """
    shown = "the URL" if "@" in str(url) else repr(url)
    try:
        address = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as exc:
        reason = "encode special characters of its password" if "@" in str(url) else exc
        raise ValueError(f"{shown} is not a valid URL: {reason}") from None
    if address.scheme not in ("http", "https") or not address.host:
        raise ValueError(f"{shown} is not a valid base URL; include the scheme, as in https://recs.shop.example")
    if address.query or address.fragment:
        raise ValueError(f"{shown} is not a valid base URL; remove the query string and the fragment")
    if "v1" in address.path.split("/"):
        raise ValueError(f"{shown} is not a valid base URL; remove /v1 and what follows it")


def require_key(key: str | None) -> None:
    """Raise ValueError unless a header can carry the key. The message does not show the key."""
    if key is not None and not (isinstance(key, str) and KEY.fullmatch(key)):
        raise ValueError("the key is empty or contains an invalid character; if the service has no keys, omit it")


def require_positive(name: str, value: float) -> None:
    """Raise ValueError unless the value is a number above 0."""
    require_number(name, value)
    if value <= 0:
        raise ValueError(f"{name} must be greater than 0")


def require_id(name: str, value: object) -> None:
    """Raise ValueError unless the value is a valid id."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text (str), not {type(value).__name__}")
    if not ID.fullmatch(value) or value in (".", ".."):
        raise ValueError(f"{name} must be 1 to 128 characters, not . or .., without control characters")


def require_name(name: str, value: object) -> None:
    """Raise ValueError unless the value is a valid name."""
    if not isinstance(value, str) or not NAME.fullmatch(value) or value in (".", ".."):
        raise ValueError(f"{name} must be 1 to 128 letters, digits or characters of _.:@- and must not be . or ..")


def require_number(name: str, value: object) -> None:
    """Raise ValueError unless the value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number")


def require_event(event: Mapping[str, object]) -> None:
    """Raise ValueError unless the service would accept the event."""
    for name, field in event.items():
        if name == "items":
            require_shown(field)
        elif name in ("timestamp", "value"):
            require_number(name, field)
        elif name in NAMES:
            require_name(name, field)
        else:
            require_id(name, field)
    value = event.get("value")
    if isinstance(value, int | float) and value < 0:
        raise ValueError("value must be 0 or greater")


def require_shown(items: object) -> None:
    """Raise ValueError unless these items are valid for one impression."""
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_SHOWN or len({*items}) < len(items):
        raise ValueError(f"an impression must have 1 to {MAX_SHOWN} different items")
    for item_id in items:
        require_id("items", item_id)


def items_at(items: Sequence[str], places: Iterable[int]) -> list[str]:
    """Return the items at these places of a list, counted from 1. Raise ValueError if a place is out of range."""
    chosen = [*places]
    if not all(1 <= place <= len(items) for place in chosen):
        raise ValueError(f"places must be between 1 and {len(items)}, the length of the list")
    return [items[place - 1] for place in chosen]
