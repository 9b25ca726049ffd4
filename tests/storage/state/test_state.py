"""The state: fold against the naive fold, deduplication against a set, and the codec."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.state.event import Event, id_time_us
from storage.state.fold import Effect, fold_event
from storage.state.generation import Generation, StateError
from storage.state.layout import State, recent_items, shown_items
from tests.storage.oracles.naive_fold import NaiveUser, assert_histogram_is, assert_state_is, fold
from tests.storage.oracles.random_events import WEIGHTS, as_impression, click, logs, make_generation, make_warm


def folded(generation: Generation, events: list[Event]) -> State:
    state = generation.empty()
    for event in events:
        fold_event(generation, state, event)
    return state


class TestFold:
    @given(logs(), st.booleans())
    @settings(max_examples=60)
    def test_the_fold_equals_the_naive_fold(self, events: list[Event], soft: bool) -> None:
        generation = make_generation(soft=soft)
        naive = NaiveUser(generation)
        fresh = [event for event in events if not naive.receive(event)[0]]
        if fresh:
            assert_state_is(generation.encode(folded(generation, fresh)), naive)

    @pytest.mark.parametrize(
        ("rates", "length"),
        [
            ((0.05, 0.25, 0.8), 1500),  # rescaled every 50 steps
            ((0.0,), 2500),  # nothing decays
            ((0.0, 1e-4), 2500),
            ((3.0, 0.001), 600),  # every 13 steps, so that old bins fall below float32
            ((100.0, 0.1), 100),  # every step
        ],
    )
    def test_histograms_stay_exact_when_the_exponent_is_rescaled_many_times(
        self, rates: tuple[float, ...], length: int
    ) -> None:
        generation = make_generation(rates=rates)
        items = np.random.default_rng(1).integers(0, 12, length)
        types = np.random.default_rng(2).choice(["click", "buy", "view"], length)
        state, naive = generation.empty(), NaiveUser(generation)
        for number, (item, event_type) in enumerate(zip(items, types, strict=True)):
            event = Event(f"e{number}", "u", f"item{item}", event_type, number, None)
            fold_event(generation, state, event)
            naive.receive(event)
            if number % 97 == 0 or number == length - 1:
                states = generation.decode_many([generation.encode(state)])
                assert_histogram_is(generation.histograms(states)[0], naive.histogram())
                assert np.all(generation.histograms(states)[0].max(axis=-1) > 0)

    def test_bins_never_hold_denormals_and_never_overflow_at_the_extreme_weights(self) -> None:
        base = make_generation(rates=(0.05, 0.25, 0.8))
        weights = {"light": 1e-6, "heavy": 1e6}
        generation = Generation(base.tag, base.decay_rates, 32, base.item_index, base.codes, weights)
        state = generation.empty()
        smallest = np.finfo(np.float32).smallest_normal
        for number in range(600):
            event_type = "heavy" if number < 50 else "light"
            fold_event(generation, state, Event(f"e{number}", "u", f"item{number % 12}", event_type, number, None))
            for values in (state["bins"], generation.histograms(np.array([state]))):
                assert np.all(np.isfinite(values))
                assert np.all((values == 0) | (values >= smallest))

    def test_a_late_event_steps_without_becoming_the_last_item_and_an_equal_time_is_not_late(self) -> None:
        generation = make_generation()
        state = generation.empty()
        assert fold_event(generation, state, click("a", item=1, timestamp_us=10)) is Effect.STEPPED
        assert fold_event(generation, state, click("b", item=2, timestamp_us=9)) is Effect.STEPPED_LATE
        assert (state["n"], state["last_item"], state["last_timestamp_us"]) == (2, 1, 10)
        assert fold_event(generation, state, click("c", item=3, timestamp_us=10)) is Effect.STEPPED
        assert state["last_item"] == 3

    def test_events_without_effect_are_reported_and_unknown_items_are_not_recent(self) -> None:
        generation = make_generation()
        state = generation.empty()
        assert fold_event(generation, state, Event("a", "u", "item1", "dislike", 10, None)) is Effect.WEIGHTLESS
        assert fold_event(generation, state, Event("b", "u", "nowhere", "click", 10, None)) is Effect.UNKNOWN_ITEM
        assert (state["n"], state["last_item"], state["event_count"]) == (0, -1, 2)
        assert recent_items(state).tolist() == [1]

    def test_a_repeated_item_takes_one_slot_of_the_recent_items(self) -> None:
        generation = make_generation()
        films = [click(f"film{item}", item=item) for item in range(10)]
        episodes = [click(f"episode{number}", item=11) for number in range(30)]
        state = folded(generation, [*films, *episodes, click("again", item=3)])
        assert recent_items(state).tolist() == [3, 11, 9, 8, 7, 6, 5, 4, 2, 1, 0]


class TestIdTime:
    def test_uuid7_contains_its_time(self) -> None:
        # RFC 9562, appendix A.6: Tuesday, February 22, 2022 2:22:22.00 PM GMT-05:00
        event_id = "017F22E2-79B0-7CC3-98C4-DC0C0C07398F"
        assert id_time_us(event_id, 5) == id_time_us(event_id.lower(), None) == 1_645_557_742_000_000

    @pytest.mark.parametrize(
        "event_id",
        ["order-17", "919108f7-52d1-4320-9bac-f847db4148a8", "017F22E2-79B0-7CC3-C8C4-DC0C0C07398F"],
        ids=["no uuid", "uuid4", "another variant"],
    )
    def test_other_ids_use_the_client_s_time_or_none(self, event_id: str) -> None:
        assert id_time_us(event_id, 5) == 5
        assert id_time_us(event_id, None) is None


class TestShown:
    def test_impressions_are_counted_until_the_item_is_chosen(self) -> None:
        generation = make_generation()
        before = folded(generation, [click("a", item=1), click("b", item=2)])
        state = before.copy()
        for number in range(300):
            event = as_impression(click(f"e{number}", timestamp_us=(10 + number) * 1_000_000), ["item2", "item3"])
            assert fold_event(generation, state, event) is Effect.SHOWN
        items, times_s, counts = shown_items(state)
        assert (items.tolist(), times_s.tolist(), counts.tolist()) == ([2, 3], [309, 309], [255, 255])
        for name in ("n", "bins", "last_item", "last_timestamp_us", "recent_items", "stepped_items", "item_count"):
            np.testing.assert_array_equal(state[name], before[name])
        assert fold_event(generation, state, click("c", item=3)) is Effect.STEPPED
        fold_event(generation, state, Event("d", "u", "item2", "dislike", 0, None))
        assert shown_items(state).items.tolist() == [2]

    def test_the_last_56_shown_items_are_kept_newest_first(self) -> None:
        generation = make_generation()
        log = [
            as_impression(
                click(f"e{time_s}", timestamp_us=time_s * 1_000_000), [f"new{time_s + item}" for item in range(10)]
            )
            for time_s in range(100)
        ]
        items, times_s, _ = shown_items(folded(generation, log))
        assert times_s.tolist() == sorted(times_s.tolist(), reverse=True)
        assert len(items) == 56
        assert {generation.state_row(f"new{item}") for item in range(99 - 46, 109)} == set(items.tolist())


class TestCodec:
    @given(logs())
    @settings(max_examples=20)
    def test_decoding_round_trips_and_folding_continues(self, events: list[Event]) -> None:
        generation = make_generation()
        half = len(events) // 2
        resumed = generation.decode(generation.encode(folded(generation, events[:half])))
        for event in events[half:]:
            fold_event(generation, resumed, event)
        assert generation.encode(resumed) == generation.encode(folded(generation, events))

    def test_the_size_stays_below_4_kib_after_any_number_of_events(self) -> None:
        generation = make_generation(rates=(0.05, 0.25, 0.8), codebooks=8)
        state = generation.empty()
        for number in range(300):
            fold_event(generation, state, click(f"e{number}", item=number % 12))
            assert len(generation.encode(state)) <= generation.dtype.itemsize
        assert generation.dtype.itemsize + 16 < 4_090  # as Redis has it, with the number of an entry before it

    def test_many_states_are_decoded_at_once(self) -> None:
        generation = make_generation()
        values = [generation.encode(folded(generation, [click("a", item=item)])) for item in (3, 1, 2)]
        states = generation.decode_many(values)
        assert states["last_item"].tolist() == [3, 1, 2]
        assert generation.decode_many([]).shape == (0,)
        singles = [generation.histograms(generation.decode_many([value]))[0] for value in values]
        assert np.array_equal(generation.histograms(states), np.stack(singles))

    def test_states_of_other_generations_and_layouts_are_refused(self) -> None:
        generation = make_generation()
        value = generation.encode(generation.empty())
        other = make_generation(tag=b"gen two\0")
        for bad in (b"", value[:-1], value + b"\0", bytes([99]) + value[1:], other.encode(other.empty())):
            with pytest.raises(StateError):
                generation.decode(bad)
            with pytest.raises(StateError):
                generation.decode_many([value, bad])

    @pytest.mark.parametrize(
        "wrong",
        [
            {"tag": b"short"},
            {"decay_rates": ()},
            {"decay_rates": (-0.1,)},
            {"decay_rates": (float("nan"),)},
            {"codewords": 2},
            {"codewords": 257},
            {"codes": np.zeros((3, 2), np.int64)},
            {"shares": np.zeros((1, 2, 5), np.float32)},
            {"shares": np.zeros((1, 2, 4), np.float64)},
            {"event_weights": {"click": 1e30}},
            {"event_weights": {"click": float("nan")}},
        ],
        ids=str,
    )
    def test_an_inconsistent_generation_is_refused(self, wrong: dict[str, object]) -> None:
        fitting: dict[str, object] = {
            "tag": b"12345678",
            "decay_rates": (0.1,),
            "codewords": 4,
            "item_index": {"a": 0},
            "codes": np.full((1, 2), 3, np.uint8),
            "event_weights": {"click": 1.0},
        }
        Generation(**fitting)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"tag|rates|code|weight"):
            Generation(**(fitting | wrong))  # type: ignore[arg-type]


class TestCarryingOver:
    """States of a generation used in one that extends it."""

    @given(logs(), st.booleans(), st.booleans())
    @settings(max_examples=60)
    def test_a_carried_over_state_equals_the_fold_unless_items_were_unknown(
        self, events: list[Event], soft: bool, is_known: bool
    ) -> None:
        before = make_generation(soft=soft)
        after = make_warm(before)
        if is_known:
            events = [replace(event, item_id=f"item{number % 12}", items=()) for number, event in enumerate(events)]
        carried = after.carried_over(before, before.encode(folded(before, events)))
        touched = {item_id for event in events for item_id in event.items or [event.item_id]}
        assert (carried is None) == (not touched <= before.item_index.keys())
        if carried is not None:
            assert carried == after.encode(folded(after, events))

    def test_states_of_unrelated_generations_are_not_carried_over(self) -> None:
        before = make_generation()
        after, value = make_warm(before), before.encode(before.empty())
        assert after.carried_over(before, value) == after.encode(after.empty())
        for bad in (b"", value[:-1], bytes([99]) + value[1:], after.encode(after.empty())):
            assert after.carried_over(before, bad) is None

    @pytest.mark.parametrize(
        "other",
        [
            {"decay_rates": (0.0, 0.05, 0.7)},
            {"event_weights": {**WEIGHTS, "view": 0.5}},
            {"event_weights": {**WEIGHTS, "wish": 0.5}},
            {"unseen_types": ("impression",)},
            {"stepped_items": 6},
            {"id_ring": 21},
            {"codewords": 33},
            {"codes": make_generation(items=14, seed=1).codes},
            {"codes": make_generation(items=11).codes},
            {"item_index": {f"item{(row + 1) % 14}": row for row in range(14)}},
            {"shares": make_generation(items=14, soft=True).shares},
        ],
        ids=lambda other: next(iter(other)),
    )
    def test_a_generation_extends_only_those_that_fold_alike(self, other: dict[str, Any]) -> None:
        before = make_generation()
        after = make_warm(before)
        assert after.extends(before)
        assert before.extends(before)
        assert not before.extends(after)
        assert replace(after, event_weights={**WEIGHTS, "dislike": -2.0, "wish": 0.0}).extends(before)
        assert not replace(after, **other).extends(before)
        soft = make_generation(soft=True)
        assert make_warm(soft).extends(soft)
        assert not make_warm(before).extends(soft)


def test_the_oracle_folds_a_hand_made_log() -> None:
    """Checks the oracle itself: two steps at one rate with one codebook."""
    generation = make_generation(rates=(0.5,), codebooks=1, items=2)
    first, second = generation.codes[:, 0].tolist()
    assert first != second
    histogram = fold(generation, [click("a", item=0), click("b", item=1), click("b", item=1)]).histogram()
    assert histogram[0, 0, first] == pytest.approx(np.exp(-0.5))
    assert histogram[0, 0, second] == 1
