"""Assertions on any store: a state is the fold of its user's log."""

from collections.abc import Sequence

from storage.protocol import UserStore
from storage.state.corrections import effective_events
from storage.state.event import LogRecord
from storage.state.generation import Generation
from tests.storage.oracles.naive_fold import assert_state_is, fold
from tests.storage.oracles.random_events import make_generation, make_newer

GENERATIONS = (make_generation(), make_newer())


async def log_of(store: UserStore, user_id: str) -> list[LogRecord]:
    """All events and corrections in the user's log."""
    return [entry.record for entry in await store.events("main", user_id, limit=1_000_000)]


async def assert_state_is_fold_of_log(store: UserStore, user_id: str) -> None:
    """For both generations; the log may be empty or have corrections."""
    log = await log_of(store, user_id)
    assert len({event.entry_id for event in log}) == len(log)
    for generation in GENERATIONS:
        (value,) = await store.states("main", [user_id], generation)
        events = list(effective_events(log))
        if events or not log:
            assert_state_is(value, fold(generation, events))
        else:
            assert value == generation.encode(generation.empty())


async def assert_states_are_folds(
    store: UserStore, user_ids: Sequence[str], *generations: Generation, tenant: str = "main"
) -> None:
    """For each of the users, whose logs have events and no corrections."""
    for user_id in user_ids:
        log = [entry.record for entry in await store.events(tenant, user_id, limit=10**6)]
        assert log
        for generation in generations:
            (value,) = await store.states(tenant, [user_id], generation)
            assert_state_is(value, fold(generation, log))


async def count_saved(store: UserStore, user_ids: Sequence[str], generation: Generation) -> int:
    """Number of up-to-date saved states of the users; the others are folded in the background."""
    return sum(value is not None for value in await store.states("main", user_ids, generation, max_missing=0))
