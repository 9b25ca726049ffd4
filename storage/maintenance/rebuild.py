"""Folding the whole log into the states of another generation, while the old one is served.

Nothing has to stop for it. Every state says how far into the user's log it reaches. So a state lacks what is logged
during a rebuild, or between it and the switch, and the next read of the state folds that. For the same reason a rebuild
can be killed at any time and run again: it only ever brings states further.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from storage.protocol import UserStore
from storage.records import MAIN_TENANT, FoldedState, LogEntry
from storage.state.compiled_fold import EventColumns, fold_many
from storage.state.event import Event, Merge, Undo, digest
from storage.state.generation import Generation


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """How much a rebuild has folded so far."""

    events: int = 0
    users: int = 0


async def rebuild(
    store: UserStore,
    generation: Generation,
    on_progress: Callable[[Rebuilt], None] = lambda _: None,
    *,
    tenant: str = MAIN_TENANT,
) -> Rebuilt:
    """Fold the tenant's log as it is now into the generation's states, and return how much that was.

    It needs memory for the users of one partition, or for one user in the embedded store.
    """
    kept, users = Rebuilt(), _UserStates(generation)
    async for page in store.log():
        if page.starts_over:
            users = _UserStates(generation)
        users.forget(page.erased)
        users.fold([(owner, entry) for owner, entry in page.entries if owner == tenant])
        done = Rebuilt(kept.events + users.events, kept.users)
        if page.is_complete:
            await store.save_states(generation, users.states())
            for tenant, user_id in users.corrected:
                await store.states(tenant, [user_id], generation)
            kept = done = Rebuilt(done.events, done.users + len(users))
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
        self._states = np.repeat(self._empty, 2)  # of fewer, numba would compile the fold again: see `fold_encoded`

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

    def states(self) -> list[FoldedState]:
        return [
            FoldedState(*name, through_seq, self._generation.encode(self._states[self._rows[name]]))
            for name, through_seq in self._through_seq.items()
            if name not in self.corrected
        ]

    def _make_room(self) -> None:
        lacking = len(self._rows) - len(self._states)
        if lacking > 0:
            spare = len(self._states)  # so that growing costs little however often
            self._states = np.concatenate([self._states, np.repeat(self._empty, lacking + spare)])
