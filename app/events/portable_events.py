"""Events of visitors who keep their own states: they are folded, but not logged."""

from collections.abc import Sequence
from functools import partial

from app.events.cold_item_learner import with_codes
from app.events.ingest import EVENT_COST, FEW_EVENTS, Ingest, refuse, require_event_count
from app.events.live_signals import LiveSignals
from app.events.new_users import Sender
from app.schemas.events import EventCounts
from storage.records import NEW, AppendResult
from storage.state.event import IMPRESSION, Event, event_hash
from storage.state.generation import Generation
from storage.state.portable_state import VISITOR, PortableState

NOT_CARRIED = "is not supported: a sealed state stores no impressions"
NOBODY = "is not allowed here: the events belong to the visitor of the sealed state"


async def fold_portable(
    ingest: Ingest,
    signals: LiveSignals,
    bodies: Sequence[object],
    state: PortableState,
    generation: Generation,
    sender: Sender,
) -> tuple[PortableState, EventCounts]:
    """Return the state after the events in the parsed bodies, each applied once, and the counts of outcomes.

    An event is a duplicate if its id is among the newest in the state. Nothing about the visitor is stored. Of the live
    signals, only click-through counts the events, as it counts all.

    raises  InvalidEvents, StorageError  as `Ingest.receive`
    """
    require_event_count(bodies)
    named = [at for at, one in enumerate(bodies) if isinstance(one, dict) and "user_id" in one]
    refuse(named, "user_id", NOBODY)
    shown = [at for at, one in enumerate(bodies) if isinstance(one, dict) and one.get("type") == IMPRESSION]
    refuse(shown, "type", NOT_CARRIED)
    of_visitor = [{**body, "user_id": VISITOR} if isinstance(body, dict) else body for body in bodies]
    received = await ingest.receive(of_visitor, sender)
    events = with_codes(received.events, signals.learners)
    work = partial(_fold, state, generation, events)
    if len(events) > FEW_EVENTS and sender.run_apart is not None:
        state, results = await sender.run_apart(work, EVENT_COST * len(events))
    else:
        state, results = work()
    signals.click_through.count(events, results)
    return state, ingest.count(events, results, received.refused)


def _fold(
    state: PortableState, generation: Generation, events: Sequence[Event]
) -> tuple[PortableState, list[AppendResult]]:
    known = state.id_hashes()
    fresh: dict[int, Event] = {}  # by the hash of its id
    results = [AppendResult(duplicate=True, unknown_item=not generation.knows_item_of(event)) for event in events]
    positions = []
    for position, event in enumerate(events):
        hashed = event_hash(event.event_id)
        if hashed not in known and hashed not in fresh:
            fresh[hashed] = event
            positions.append(position)
    if fresh:
        state, folded = state.folded(generation, list(fresh.values()), list(fresh))
        for position, late, unknown in zip(positions, folded.late, folded.unknown, strict=True):
            results[position] = NEW[unknown, late]
    return state, results
