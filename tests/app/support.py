"""What tests of the app share beside fixtures."""

from __future__ import annotations


def bearer(key: str) -> dict[str, str]:
    """The headers of a request with the key."""
    return {"authorization": f"Bearer {key}"}
