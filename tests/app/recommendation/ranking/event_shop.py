"""A service and an oracle that apply the same steps of users' histories."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import strategies as st

from storage.state.event import Event
from tests.app.conftest import Client, item_id
from tests.app.support import CORRECTIONS, correct
from tests.storage.archive.archived_redis import turn
from tests.storage.oracles.naive_users import NaiveUsers

NOW_S = int(time.time())
NAMES = "ab"

names = st.sampled_from(NAMES)
ids = st.integers(0, 3).map("e{}".format)
others = st.tuples(st.just("undo"), names, ids) | st.tuples(st.sampled_from(["merge", "erase", "archive"]), names)


class Shop:
    """A service with a fixed clock for rules by events, and the place of its archive, if any."""

    def __init__(self, client: Client, archive: Any) -> None:
        self.client = client
        self.archive = archive

    def apply(self, users: NaiveUsers, prefix: str, what: str, name: str, *rest: Any) -> None:
        """Apply one step to the service and to the oracle."""
        user_id = f"{prefix}-{name}"
        other = next(f"{prefix}-{one}" for one in NAMES if one != name)
        if what == "post":
            event_id, row, kind, age_s = rest
            event = Event(event_id, user_id, item_id(row), kind, (NOW_S - age_s) * 1_000_000, None)
            posted = {"event_id": event_id, "user_id": user_id, "item_id": item_id(row), "type": kind}
            answer = self.client.post("/v1/events", json=posted | {"timestamp": NOW_S - age_s}).json()
            assert answer["accepted"] == users.post(event)
        elif what in CORRECTIONS:
            correct(self.client, users, what, user_id, rest[0] if what == "undo" else other)
        elif self.archive is not None:
            turn(*self.archive)
