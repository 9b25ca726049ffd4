"""Times of events do not change while the system clock is wrong for seconds."""

from __future__ import annotations

import time
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.events.ingest import FOLLOW_JUMPS_AFTER_S
from app.events.steady_clock import MAX_DRIFT_NS, SteadyClock
from tests.app.conftest import Client

YEAR_S = 365 * 86_400
MAX_DRIFT_S = MAX_DRIFT_NS / 1e9


class Setting(NamedTuple):
    """A clock setting: its offset from true time, and how many seconds it lasts."""

    wrong_by_s: int
    stands_s: int


SETTINGS = st.lists(
    st.builds(
        Setting,
        st.one_of(st.integers(-29, 29), st.sampled_from([YEAR_S, -YEAR_S, 3_600, -3_600, 50 * YEAR_S])),
        st.integers(1, 3 * int(FOLLOW_JUMPS_AFTER_S)),
    ),
    max_size=12,
)


class Machine:
    """A fake clock and uptime."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.up_s, self.wrong_by_s = 1_000, 0
        patch.setattr("time.time_ns", lambda: (1_763_700_000 + self.up_s + self.wrong_by_s) * 10**9)
        patch.setattr("time.clock_gettime_ns", lambda _: self.up_s * 10**9)

    @property
    def true_us(self) -> int:
        return (1_763_700_000 + self.up_s) * 10**6


@given(SETTINGS)
def test_the_steady_clock_follows_only_lasting_changes(settings: list[Setting]) -> None:
    """Read every second; it adopts a setting only after this has lasted long enough."""
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch)
        clock = SteadyClock(FOLLOW_JUMPS_AFTER_S)
        followed, since_s = 0, 0
        for wrong_by_s, stands_s in settings:
            if abs(wrong_by_s - machine.wrong_by_s) > MAX_DRIFT_S:
                since_s = machine.up_s
            machine.wrong_by_s = wrong_by_s
            for _ in range(stands_s):
                is_near = abs(wrong_by_s - followed) <= MAX_DRIFT_S
                if is_near or machine.up_s - since_s >= FOLLOW_JUMPS_AFTER_S:
                    followed = wrong_by_s
                assert abs(clock.now_us() - machine.true_us - followed * 10**6) <= MAX_DRIFT_NS / 1_000
                machine.up_s += 1


@pytest.mark.parametrize("years", [1, -50])
def test_a_clock_error_of_seconds_makes_no_event_late(
    client: Client, monkeypatch: pytest.MonkeyPatch, years: int
) -> None:
    """A clock one year ahead would otherwise make all events of the user late for a year."""
    now_ns = time.time_ns
    client.click("ada", "item-1")
    with monkeypatch.context() as patch:
        patch.setattr("time.time_ns", lambda: now_ns() + years * YEAR_S * 10**9)
        client.click("ada", "item-2")
        event = {"user_id": "ada", "item_id": "item-3", "timestamp": now_ns() / 1e9}
        assert client.post("/v1/events", json=event).json()["accepted"] == 1, "of a client whose clock is right"
        assert client.get("/v1/users/ada").json()["last_item_id"] == "item-3"
    client.click("ada", "item-4")
    assert client.get("/v1/users/ada").json()["last_item_id"] == "item-4"
    times = [event.timestamp_us for event in client.log("ada")]
    assert times == sorted(times)
    assert abs(times[-1] - now_ns() / 1e3) < YEAR_S * 1e6 / 2
