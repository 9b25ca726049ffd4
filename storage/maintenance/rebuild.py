"""Folding the whole log into the states of another generation, while the old one is served.

Services keep running meanwhile. Every state records its position in the user's log. Events that are logged during a
rebuild, or between it and the switch, are therefore folded by the next read of the state. For the same reason a rebuild
can be killed at any time and run again: it only moves states forward.

A generation may extend another one, for example if the training of its model continued from the other model. Then the
states of users whose items the other model had all learned are copied, and only those of other users are folded. A
state records whether its user has other items.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

import numpy as np

from storage.protocol import UserStore
from storage.records import MAIN_TENANT, FoldedState, LogEntry
from storage.state.compiled_fold import EventColumns, fold_many
from storage.state.event import Event, Merge, Undo, digest
from storage.state.generation import Generation

FEW = 0.01  # of the users: reading the logs of this share one by one takes no longer than reading the whole log
ENCODED_AT_ONCE = 1000  # states, about 4 MB


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The progress of a rebuild.

    events, users  folded
    carried        users whose states were copied unchanged
    """

    events: int = 0
    users: int = 0
    carried: int = 0


NOTHING = Rebuilt()


async def rebuild(
    store: UserStore,
    generation: Generation,
    on_progress: Callable[[Rebuilt], None] = lambda _: None,
    *,
    tenant: str = MAIN_TENANT,
    before: Generation | None = None,
) -> Rebuilt:
    """Fold the tenant's log into the generation's states. Return the numbers of users and events.

    It needs memory for the users of one partition, or for one user in the embedded store.

    before  a generation with states. If the new one extends it, its states are copied, and only those that cannot be
            copied are folded; the ids of their users are held in memory
    """
    if before is None or not generation.extends(before):
        return await _fold_log(store, generation, on_progress, tenant)
    carried, left = await _carry_over(store, generation, before, on_progress)
    if len(left) > FEW * (carried + len(left)):
        return await _fold_log(store, generation, on_progress, tenant, Rebuilt(carried=carried), left)
    for user_id in left:
        await store.states(tenant, [user_id], generation)
    done = Rebuilt(users=len(left), carried=carried)
    on_progress(done)
    return done


async def _carry_over(
    store: UserStore, generation: Generation, before: Generation, on_progress: Callable[[Rebuilt], None]
) -> tuple[int, set[str]]:
    """Copy the states that can be copied; return their number, and the users who have to be folded."""
    carried, left = 0, set[str]()
    async for states in store.generations.states(before.tag):
        taken = []
        for state in states:
            value = generation.carried_over(before, state.value)
            if value is None:
                left.add(state.user_id)
            else:
                taken.append(replace(state, value=value))
        await store.save_states(generation, taken)
        carried += len(taken)
        on_progress(Rebuilt(carried=carried))
    return carried, left


async def _fold_log(
    store: UserStore,
    generation: Generation,
    on_progress: Callable[[Rebuilt], None],
    tenant: str,
    kept: Rebuilt = NOTHING,
    only: Collection[str] | None = None,
) -> Rebuilt:
    """Fold the log of the tenant's users, all of them or only these; `kept` is the progress so far."""
    users = _UserStates(generation)
    async for page in store.log():
        if page.starts_over:
            users = _UserStates(generation)
        users.forget(page.erased)
        own = [(owner, entry) for owner, entry in page.entries if owner == tenant]
        users.fold(own if only is None else [one for one in own if one[1].record.user_id in only])
        done = replace(kept, events=kept.events + users.events)
        if page.is_complete:
            for states in users.states():
                await store.save_states(generation, states)
            for tenant, user_id in users.corrected:
                await store.states(tenant, [user_id], generation)
            kept = done = replace(done, users=done.users + len(users))
            users = _UserStates(generation)
        on_progress(done)
    return kept


class _UserStates:
    """States of users whose logs are being read.

    corrected  users with an undo: they are few, and are folded one by one from their whole logs
    """

    def __init__(self, generation: Generation) -> None:
        self.events = 0
        self.corrected: set[tuple[str, str]] = set()
        self._generation = generation
        self._rows: dict[tuple[str, str], int] = {}
        self._through_seq: dict[tuple[str, str], int] = {}
        self._empty = np.array([generation.empty()])
        self._states = np.repeat(self._empty, 2)  # with fewer, numba would compile the fold again: see `fold_encoded`

    def __len__(self) -> int:
        return len(self._through_seq)

    def forget(self, erased: Sequence[tuple[str, bytes]]) -> None:
        if not erased:
            return
        gone = set(erased)
        for name in [name for name in self._through_seq if (name[0], digest(name[1])) in gone]:
            self._forget(name)

    def _forget(self, name: tuple[str, str]) -> None:
        if name in self._through_seq:
            self._states[self._rows[name]] = self._empty[0]
            del self._through_seq[name]

    def fold(self, entries: Sequence[tuple[str, LogEntry]]) -> None:
        self._fold_events([(tenant, one.seq, one.record) for tenant, one in entries if isinstance(one.record, Event)])
        for tenant, entry in entries:
            match entry.record:
                case Merge(user_id):
                    self._forget((tenant, user_id))  # nobody reads the state of a merged user
                    self.corrected.discard((tenant, user_id))
                case Undo(user_id):
                    self.corrected.add((tenant, user_id))

    def _fold_events(self, entries: Sequence[tuple[str, int, Event]]) -> None:
        self.events += len(entries)
        names = [(tenant, event.user_id) for tenant, _, event in entries]
        fresh = (name for name in dict.fromkeys(names) if name not in self._rows)
        self._rows.update(zip(fresh, count(len(self._rows)), strict=False))
        self._through_seq.update((name, seq) for name, (_, seq, _) in zip(names, entries, strict=True))
        self._make_room()
        rows = np.fromiter((self._rows[name] for name in names), np.int64, len(names))
        columns = EventColumns.from_events(self._generation, [event for _, _, event in entries])
        fold_many(self._generation, self._states, rows, columns)

    def states(self) -> Iterator[list[FoldedState]]:
        """Yield the states of all users without an undo, some at a time."""
        names = iter([name for name in self._through_seq if name not in self.corrected])
        while some := list(islice(names, ENCODED_AT_ONCE)):
            values = self._generation.encode_many(self._states[[self._rows[name] for name in some]])
            yield [FoldedState(*name, self._through_seq[name], value) for name, value in zip(some, values, strict=True)]

    def _make_room(self) -> None:
        lacking = len(self._rows) - len(self._states)
        if lacking > 0:
            spare = len(self._states)  # so that growing costs little however often
            self._states = np.concatenate([self._states, np.repeat(self._empty, lacking + spare)])
