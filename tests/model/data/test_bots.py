"""Users with more events than any person: reported, and limited to their newest events in training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from model.config import DataCard, TrainOn
from model.data.arrays import IN_MEMORY, MappedArrays
from model.data.exports.checks import examine
from model.data.exports.mapping import TableMapping
from model.data.interactions import repeat_share, warn_of_bots
from model.data.readers import read_interactions
from model.data.splits import MAX_EVENTS_OF_USER, split, thinned

Write = Callable[..., Path]
PEOPLE = [(f"u{user}", f"i{user % 7}", time) for user in range(60) for time in range(4)]
BOT = [("bot", f"i{time % 3}", time) for time in range(MAX_EVENTS_OF_USER + 5)]


@pytest.mark.parametrize("piece", [None, 25])
@pytest.mark.parametrize(("train_on", "held_out"), [("train", 2), ("all", 0)])
def test_training_uses_only_the_newest_events_of_a_bot(
    tmp_path: Path, write_rows: Write, piece: int | None, train_on: TrainOn, held_out: int
) -> None:
    directory = write_rows(tmp_path / "data", [*PEOPLE, *BOT])
    found = read_interactions(directory, IN_MEMORY if piece is None else MappedArrays(tmp_path / "work", piece))
    whole = split(found, "loo", train_on)
    before, held = whole.train.copy(), (whole.validation.copy(), whole.test.copy())
    parts = thinned(found, whole, DataCard(train_on=train_on))
    of_bot = found.user == found.user_ids.index("bot")
    np.testing.assert_array_equal(parts.train[~of_bot], before[~of_bot])
    oldest = len(BOT) - held_out - MAX_EVENTS_OF_USER
    expected = [oldest <= place < len(BOT) - held_out for place in range(len(BOT))]
    assert parts.train[of_bot].tolist() == expected
    for one, other in zip((parts.validation, parts.test), held, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_training_warns_of_bots_and_not_of_regulars(
    tmp_path: Path, write_rows: Write, caplog: pytest.LogCaptureFixture
) -> None:
    regular = [("regular", "i1", time) for time in range(800)]
    warn_of_bots(read_interactions(write_rows(tmp_path / "people", [*PEOPLE, *regular])))
    assert not caplog.messages
    warn_of_bots(read_interactions(write_rows(tmp_path / "bots", [*PEOPLE, *regular, *BOT])))
    assert caplog.messages[0].startswith("1 users have 10005 of 11045 events, the median user 4: leave out bots")


def test_a_check_names_bots(tmp_path: Path, write_rows: Write) -> None:
    guests = [("guest", item, time) for _, item, time in BOT[:2_000]]

    def findings(rows: list[tuple[str, str, int]]) -> list[str]:
        tables = examine(write_rows(tmp_path / str(len(rows)), rows), TableMapping())
        return [one.problem for one in tables["interactions"].findings]

    named = "some users have far more events than others: 'bot' (10,005), 'guest' (2,000)"
    assert named in findings([*PEOPLE, *guests, *BOT])
    assert not any("far more events" in one for one in findings(PEOPLE))


def test_bots_do_not_decide_the_repeat_share(tmp_path: Path, write_rows: Write) -> None:
    people = repeat_share(read_interactions(write_rows(tmp_path / "people", PEOPLE)))
    with_bot = read_interactions(write_rows(tmp_path / "bot", [*PEOPLE, *BOT]))
    assert repeat_share(with_bot) == people


def test_users_without_training_events_do_not_affect_bot_detection(
    tmp_path: Path, write_rows: Write, caplog: pytest.LogCaptureFixture
) -> None:
    """In a small shop, each regular has more than 1% of the events."""
    rows = [(*row, "click") for row in PEOPLE] + [(f"guest{user}", "i1", user, "search") for user in range(99)]
    directory = write_rows(tmp_path / "shop", rows, columns="user_id item_id timestamp type")
    found = read_interactions(directory).stepping({"click": 1.0, "search": 0.0})
    warn_of_bots(found)
    assert not caplog.messages
    assert repeat_share(found) == 0.75
