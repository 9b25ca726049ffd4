"""The histories of the users whom both services of a comparison answer."""

from __future__ import annotations

import httpx
import numpy as np

from app.jobs.loadtest.synthetic_catalogue import item_id

USERS = 256
HISTORY = 30


def histories_of(items: int) -> list[list[int]]:
    """Return the rows of each user's items, oldest first."""
    histories: list[list[int]] = np.random.default_rng(0).integers(0, items, (USERS, HISTORY)).tolist()
    return histories


def post_histories(url: str, items: int) -> None:
    """Post them to a service of lisarec."""
    with httpx.Client(base_url=url) as client:
        for user, rows in enumerate(histories_of(items)):
            events = [{"user_id": f"user-{user}", "item_id": item_id(row)} for row in rows]
            client.post("/v1/events", json=events).raise_for_status()
