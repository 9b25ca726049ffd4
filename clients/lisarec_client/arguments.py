"""Checks of arguments: what the service would refuse, or what could never reach it, is refused where it is written."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import httpx

ID = re.compile(r"[A-Za-z0-9_.:@-]{1,128}")
MAX_SHOWN = 50  # items of an impression
KEY = re.compile(r"[!-~]+")  # what a header can carry


def require_address(url: str) -> None:
    """Raise ValueError unless the URL is the address of a service: http or https, a host, perhaps a path."""
    try:
        address = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as exc:
        raise ValueError(f"{url!r} is no address: {exc}") from None
    if address.scheme not in ("http", "https") or not address.host:
        raise ValueError(f"{url!r} is no address of a service; write it with its scheme, as https://recs.shop.example")
    if address.query or address.fragment:
        raise ValueError(f"{url!r} is no address of a service: calls are added to it, so it ends with host or path")
    if "v1" in address.path.split("/"):
        raise ValueError(f"{url!r} is no address of a service but of a call: it ends before /v1")


def require_key(key: str | None) -> None:
    """Raise ValueError unless the key can be sent; the message does not show it."""
    if key is not None and not (isinstance(key, str) and KEY.fullmatch(key)):
        raise ValueError("the key is empty or has a character that no key has; without keys leave it out")


def require_positive(name: str, value: float) -> None:
    """Raise ValueError unless the value is a number above 0."""
    require_number(name, value)
    if value <= 0:
        raise ValueError(f"{name} has to be above 0")


def require_id(name: str, value: object) -> None:
    """Raise ValueError unless the value is an id that the service accepts."""
    if not isinstance(value, str) or not ID.fullmatch(value) or value in (".", ".."):
        raise ValueError(f"{name} has to be 1 to 128 letters, digits or _.:@- and neither . nor ..")


def require_number(name: str, value: object) -> None:
    """Raise ValueError unless the value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} has to be a finite number")


def require_event(event: Mapping[str, object]) -> None:
    """Raise ValueError unless the service would accept the event."""
    for name, field in event.items():
        if name == "items":
            require_shown(field)
        elif name in ("timestamp", "value"):
            require_number(name, field)
        else:
            require_id(name, field)
    value = event.get("value")
    if isinstance(value, int | float) and value < 0:
        raise ValueError("value has to be 0 or more")


def require_shown(items: object) -> None:
    """Raise ValueError unless these are items that one impression may have."""
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_SHOWN or len({*items}) < len(items):
        raise ValueError(f"an impression has 1 to {MAX_SHOWN} different items")
    for item_id in items:
        require_id("items", item_id)


def items_at(items: Sequence[str], places: Iterable[int]) -> list[str]:
    """Return the items at these places of a list, the first of which is 1; ValueError where it has none."""
    chosen = [*places]
    if not all(1 <= place <= len(items) for place in chosen):
        raise ValueError(f"places have to be from 1 to {len(items)}, as many as the list has")
    return [items[place - 1] for place in chosen]
