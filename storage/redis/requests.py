"""Requests that wait for a round of the Redis store, and the replies to their callers."""

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from redis.exceptions import MovedError, NoScriptError, TryAgainError

from storage.errors import PartlyApplied, StorageError, StorageUnavailable
from storage.records import DUPLICATE, NEW, AppendResult
from storage.redis.connections.nodes import storage_error
from storage.redis.layout.head import MERGE_MARK, SEQ_DIGITS, Head
from storage.redis.layout.keys import Keyspace, User
from storage.redis.layout.stream_entries import Change, Entry
from storage.redis.session.cooperative_loops import SLICE
from storage.state.compiled_fold import fold_encoded
from storage.state.event import Event, Merge, Undo
from storage.state.generation import Generation

TIMEOUT_S = 5.0
NOTHING: Set[tuple[User, int]] = frozenset()


class _Waiting(ABC):
    """A call that waits for a round, until a deadline."""

    deadline_s: float

    @abstractmethod
    def fail(self, cause: Exception) -> None: ...

    def expire(self, now_s: float) -> bool:
        """Fail after the deadline, because the server is too slow; return whether it has passed."""
        is_late = now_s > self.deadline_s
        if is_late:
            self.fail(StorageUnavailable("Redis responds too slowly", "timeout"))
        return is_late


class Read(_Waiting):
    """A read of keys, which share a slot: of one user, or of several on a single server."""

    def __init__(self, keys: list[str]) -> None:
        loop = asyncio.get_running_loop()
        self.keys, self.key = keys, keys[0]
        self.size = len(keys)
        self.answer: asyncio.Future[list[bytes | None]] = loop.create_future()
        self.deadline_s = loop.time() + TIMEOUT_S

    def settle(self, values: list[bytes | None] | Exception) -> None:
        """Answer with the values, or the error."""
        if isinstance(values, Exception):
            self.fail(values)
        elif not self.answer.done():  # otherwise it was cancelled
            self.answer.set_result(values)

    def fail(self, cause: Exception) -> None:
        """Answer with an error."""
        if not self.answer.done():
            self.answer.set_exception(storage_error(cause))


class Request:
    """A call of `append`. It has one part per partition, and is answered when all parts are settled."""

    def __init__(self, size: int) -> None:
        self.answer: asyncio.Future[list[AppendResult]] = asyncio.get_running_loop().create_future()
        self.deadline_s = asyncio.get_running_loop().time() + TIMEOUT_S
        self._failure: StorageError | None = None
        self._results: list[AppendResult | None] = [None] * size
        self._open_parts: set[Part] = set()

    async def split(self, keys: Keyspace, tenant: str, events: Sequence[Event | Undo]) -> "list[Part]":
        """Return the parts of the request."""
        parts: dict[str, Part] = {}
        for position, event in enumerate(events):
            if position and position % SLICE == 0:
                await asyncio.sleep(0)
            user = keys.user(tenant, event.user_id)
            entry = Entry.of(tenant, event)
            part = parts.get(user.partition) or parts.setdefault(user.partition, Part(self, user.partition))
            part.add(user, entry, position)
        self._open_parts.update(parts.values())
        return list(parts.values())

    def replace(self, part: "Part", parts: "Sequence[Part]") -> None:
        """Wait for other parts instead of this one. If it is already settled, do not wait for those either."""
        if part in self._open_parts:
            self._open_parts.remove(part)
            self._open_parts.update(parts)

    def settle(self, part: "Part", results: Sequence[AppendResult] | StorageError) -> None:
        """Record the results of a part, or its failure. A settled part does not change."""
        if part not in self._open_parts:
            return
        self._open_parts.remove(part)
        if isinstance(results, StorageError):
            self._failure = self._failure or results
        else:
            for position, result in zip(part.positions, results, strict=True):
                self._results[position] = result
        if not self._open_parts and not self.answer.done():
            self._reply()

    def _reply(self) -> None:
        results = {position: result for position, result in enumerate(self._results) if result is not None}
        if self._failure is None:
            self.answer.set_result(list(results.values()))
        elif results:
            self.answer.set_exception(PartlyApplied(self._failure, results))
        else:
            self.answer.set_exception(self._failure)


class Part(_Waiting):
    """The events of a request in one partition. Each user's events are applied together, or not at all."""

    def __init__(self, request: Request, partition: str, refusals: int = 0) -> None:
        self.request = request
        self.deadline_s = request.deadline_s
        self.partition = self.key = partition  # PREFIX:{p17}
        self.entries: list[tuple[User, Entry]] = []
        self.positions: list[int] = []  # positions of the entries in the request
        self.size = 0
        self.refusals = refusals
        self.logged: Set[tuple[User, int]] = NOTHING  # what a refused commit said, by hashes of ids
        # The ids that the archive contained when it held the partition's log up to an entry, and how far it must go.
        self.archived: Set[tuple[User, int]] = NOTHING
        self.searched_through = 0
        self.must_search_through = 0
        self.asked_about_users = False

    @property
    def number(self) -> int:
        """The number of the partition."""
        return self.entries[0][0].partition_number

    def add(self, user: User, entry: Entry, position: int) -> None:
        """Add an entry of the request."""
        self.entries.append((user, entry))
        self.positions.append(position)
        self.size += 1

    def is_waiting(self, now_s: float) -> bool:
        """Return whether a caller still waits, even for other parts only; settle a part that is too late."""
        return not (self.request.answer.done() or self.expire(now_s))

    def fail(self, cause: Exception) -> None:
        """Settle the part with an error."""
        self.request.settle(self, storage_error(cause))

    def without(self, failures: "Mapping[User, Exception]") -> "list[Part]":
        """Fail the entries of these users; return the part with the remaining entries, if any."""
        if not failures:
            return [self]  # the common case
        for user, failure in failures.items():
            for other in self.split_off({user}):
                other.fail(failure)
        if not self.entries:
            self.request.settle(self, [])
        return [self] if self.entries else []

    def unknown_users(self, folds: "Mapping[User, UserFold]") -> "list[User]":
        """Return users without a head that the archive was not asked about."""
        return [] if self.asked_about_users else [user for user, _ in self.entries if folds[user].head is None]

    def has_any_of(self, users: Set[User]) -> bool:
        """Return whether any of the entries is of one of these users."""
        return bool(users) and any(user in users for user, _ in self.entries)

    @property
    def records(self) -> list[Event | Undo]:
        """The events and undos, in order; merges are not appended this way."""
        return [entry.event for _, entry in self.entries if not isinstance(entry.event, Merge)]

    def places_by_user(self) -> dict[User, list[int]]:
        """Return the positions of each user's entries."""
        places: defaultdict[User, list[int]] = defaultdict(list)
        for place, (user, _) in enumerate(self.entries):
            places[user].append(place)
        return places

    def split_off(self, users: Set[User]) -> "list[Part]":
        """Move the entries of these users to a part of their own, and return it, if there are any."""
        other = Part(self.request, self.partition, self.refusals)
        other.asked_about_users, other.logged = self.asked_about_users, self.logged
        own = list(zip(self.entries, self.positions, strict=True))
        self.entries, self.positions, self.size = [], [], 0
        for (user, entry), position in own:
            (other if user in users else self).add(user, entry, position)
        if not other.entries:
            return []
        self.request.replace(self, [self, other])
        return [other]

    def needs_archive(self, folds: "Mapping[User, UserFold]") -> bool:
        """Return whether only the archive can determine which entries were logged, and has not been asked yet."""
        if all(len(folds[user].head or b"") <= SEQ_DIGITS for user, _ in self.entries):
            return False  # no entry of these users was archived
        heads = {user: Head.of(folds[user].head) for user, _ in self.entries}
        self.must_search_through = max(head.archived for head in heads.values())
        return self.searched_through < self.must_search_through and any(
            heads[user].may_be_archived(entry.event.entry_id)
            and (user, entry.id_hash) not in self.logged
            and not folds[user].knows(entry)
            for user, entry in self.entries
        )

    def may_retry(self, why: str) -> bool:
        """Count a rejected commit; after the deadline, fail and return False."""
        self.refusals += 1
        if asyncio.get_running_loop().time() < self.deadline_s:
            return True
        self.fail(StorageUnavailable(f"{self.refusals} times {why}", "contention"))
        return False


@dataclass(slots=True)
class UserFold:
    """A user as stored, and after folding new entries."""

    user: User
    serving: Sequence[Generation]
    head_key: str
    id_index: str
    state_keys: list[str]  # one per generation
    head: bytes | None = None
    states: dict[bytes, bytes] = field(default_factory=dict)  # states of the whole log, by tag of the generation
    stale: list[tuple[Generation, bytes | None]] = field(default_factory=list)  # with the stored value, if any
    seen: set[int] = field(default_factory=set)  # hashes of ids known to be logged, and of new ones
    new: list[Entry] = field(default_factory=list)
    outcomes: dict[int, AppendResult] = field(default_factory=dict)  # of folding, by the hashes of new ids
    failure: Exception | None = None  # why the user cannot be read

    def load(self, values: list[bytes | None] | Exception) -> None:
        """Set the values of the keys, or the error."""
        if isinstance(values, Exception):
            self.failure = values
            return
        self.head = values[0]
        try:
            Head.check(self.head, *values[1:])
        except StorageError as exc:
            self.failure = exc
            return
        for generation, stored in zip(self.serving, values[1:], strict=True):
            if self.head is None:
                self.states[generation.tag] = generation.encoded_empty
            elif (value := fresh_state(generation, stored, self.head)) is not None:
                self.states[generation.tag] = value
            else:
                self.stale.append((generation, stored))

    @property
    def is_merged(self) -> bool:
        """Whether the user was merged, or is about to be merged, into another one."""
        is_marked = self.failure is None and self.head is not None and len(self.head) > MERGE_MARK
        return is_marked and Head.of(self.head).merge is not None

    def knows(self, entry: Entry) -> bool:
        """Return whether the entry is known to be logged; only the script knows all logged entries."""
        return entry.id_hash in self.seen or any(
            generation.remembers(self.states[generation.tag], entry.id_hash)
            for generation in self.serving
            if generation.tag in self.states
        )

    def receive(self, entry: Entry) -> bool:
        """Add the entry unless it is known to be logged; return whether it was added."""
        if self.knows(entry):
            return False
        self.seen.add(entry.id_hash)
        self.new.append(entry)
        if not isinstance(entry.event, Event):  # happens when a back-up is restored
            self.states.clear()  # the next reader folds them
        return True

    def result(self, entry: Entry) -> AppendResult:
        """Return the result of a new entry in the first generation."""
        return self.outcomes.get(entry.id_hash) or AppendResult.unfolded(self.serving[0], entry.event)

    def change(self) -> Change:
        """Return the change to commit."""
        states = {
            key: self.states[generation.tag]
            for generation, key in zip(self.serving, self.state_keys, strict=True)
            if generation.tag in self.states
        }
        return Change(self.head_key, self.id_index, self.head or b"", self.new, states)


def fresh_state(generation: Generation, stored: bytes | None, head: bytes) -> bytes | None:
    """Return the encoded state in a stored value, if it covers the log up to the head."""
    if stored is None or stored[:SEQ_DIGITS] != head[:SEQ_DIGITS]:
        return None
    value = stored[SEQ_DIGITS:]
    return value if generation.fits(value) else None


class Commit:
    """The parts of a round in one partition, and the changes of their users.

    Each user's change is applied or rejected independently.
    """

    def __init__(self, parts: Sequence[Part], folds: Mapping[User, UserFold]) -> None:
        self.partition = parts[0].partition
        self.parts = parts
        self.folds = {user: folds[user] for part in parts for user, _ in part.entries}
        self._is_new: list[list[bool]] = []  # for the parts' entries

    def decide(self) -> list[Part]:
        """Return the parts that the archive must decide; if there are none, record which entries are new."""
        undecided = [part for part in self.parts if part.needs_archive(self.folds)]
        if not undecided:
            for part in self.parts:  # before any entry is received: others may have sent the same ones
                for user, id_hash in part.logged | part.archived:
                    if user in self.folds:
                        self.folds[user].seen.add(id_hash)
            self._is_new = [[self.folds[user].receive(entry) for user, entry in part.entries] for part in self.parts]
        return undecided

    def changes(self) -> list[Change]:
        """Return the changes of users with new entries."""
        return [fold.change() for fold in self.folds.values() if fold.new]

    def settle(self, replies: Sequence[Any] | Exception) -> list[Part]:
        """Settle the parts with one reply per change; return the parts that must wait for the next round."""
        if isinstance(replies, TryAgainError):
            return self._retries(self.parts, "the cluster was migrating the users' partition")
        if isinstance(replies, MovedError | NoScriptError):
            # a node that has just received the partition may lack data that the fold is based on
            return self._retries(self.parts, "the users' partition was on another node")
        if isinstance(replies, Exception):
            return self.fail(replies)
        changed = [fold.user for fold in self.folds.values() if fold.new]
        others = {user: reply for user, reply in zip(changed, replies, strict=True) if not isinstance(reply, bytes)}
        failed = {user: reply for user, reply in others.items() if isinstance(reply, Exception)}
        refused = others.keys() - failed.keys()
        logged = {(user, int.from_bytes(member, "little")) for user in refused for member in others[user]}
        retries: list[Part] = []
        for part, is_new in zip(self.parts, self._is_new, strict=True):
            if refused or failed:
                applied = [user not in refused and user not in failed for user, _ in part.entries]
                is_new = list(compress(is_new, applied))
                part.logged |= logged
                retries += part.split_off(refused)
                for user, failure in failed.items():
                    for other in part.split_off({user}):
                        other.fail(failure)
            results = [
                self.folds[user].result(entry) if new else DUPLICATE
                for new, (user, entry) in zip(is_new, part.entries, strict=True)
            ]
            part.request.settle(part, results)
        return self._retries(retries, "concurrent writes changed the same users")

    def fail(self, cause: Exception) -> list[Part]:
        """Settle all parts with an error; no part is retried."""
        for part in self.parts:
            part.fail(cause)
        return []

    def _retries(self, parts: Sequence[Part], why: str) -> list[Part]:
        return [part for part in parts if part.may_retry(why)]


def commits_of(parts: Iterable[Part], folds: Mapping[User, UserFold]) -> list[Commit]:
    """Return a commit for each partition of the parts."""
    by_partition: dict[str, list[Part]] = {}
    for part in parts:
        by_partition.setdefault(part.partition, []).append(part)
    return [Commit(own, folds) for own in by_partition.values()]


def fold_new_entries(serving: Sequence[Generation], commits: Sequence[Commit]) -> None:
    """Fold the new entries of all users into their states."""
    folds = [fold for commit in commits for fold in commit.folds.values() if fold.new]
    for generation in serving:
        own = [fold for fold in folds if generation.tag in fold.states]
        entries = [entry for fold in own for entry in fold.new]
        if not entries:
            continue
        users = [place for place, fold in enumerate(own) for _ in fold.new]
        folded = fold_encoded(
            generation,
            [fold.states[generation.tag] for fold in own],
            users,
            [entry.event for entry in entries if isinstance(entry.event, Event)],  # undos leave no state to fold into
            [entry.id_hash for entry in entries],
        )
        for fold, value in zip(own, folded.states, strict=True):
            fold.states[generation.tag] = value
        if generation is serving[0]:
            for place, entry, unknown, late in zip(users, entries, folded.unknown, folded.late, strict=True):
                own[place].outcomes[entry.id_hash] = NEW[unknown, late]
