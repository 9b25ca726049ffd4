"""What waits for a round of the Redis store, and how whoever asked for it is answered."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from redis.exceptions import MovedError, NoScriptError, ResponseError, TryAgainError

from storage.corrections import is_correction, readdressed
from storage.errors import PartlyApplied, StorageError, StorageUnavailable
from storage.fold import fold_encoded
from storage.records import AppendResult
from storage.redis_layout import MARK, SEQ_DIGITS, Change, Entry, Head, Keyspace, User
from storage.redis_servers import failure_of
from storage.state import Generation
from storage.state_event import Event

GIVE_UP_AFTER_S = 5.0
DUPLICATE = AppendResult(duplicate=True)


@dataclass(slots=True, eq=False)
class Read:
    """Keys whose values somebody waits for."""

    keys: list[str]  # of one user
    answer: "asyncio.Future[list[bytes | None]]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    give_up_at_s: float = field(default_factory=lambda: asyncio.get_running_loop().time() + GIVE_UP_AFTER_S)

    @property
    def size(self) -> int:
        return len(self.keys)

    def is_too_late(self) -> bool:
        """The server is so slow that nobody should wait any longer."""
        late = asyncio.get_running_loop().time() > self.give_up_at_s
        if late:
            self.fail(StorageUnavailable("Redis answers too slowly"))
        return late

    def succeed(self, values: list[bytes | None]) -> None:
        if not self.answer.done():  # else it was cancelled
            self.answer.set_result(values)

    def fail(self, cause: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(failure_of(cause))


class Request:
    """A call of `append`. It falls into parts, one for each partition, and is answered when all are settled."""

    def __init__(self, size: int) -> None:
        self.answer: asyncio.Future[list[AppendResult]] = asyncio.get_running_loop().create_future()
        self.failure: StorageError | None = None
        self._answers: list[AppendResult | None] = [None] * size
        self._open_parts: set[Part] = set()

    def parts(self, keys: Keyspace, tenant: str, events: Sequence[Event]) -> "list[Part]":
        parts: dict[str, Part] = {}
        for position, event in enumerate(events):
            user = keys.user(tenant, event.user_id)
            part = parts.get(user.partition) or parts.setdefault(user.partition, Part(self))
            part.entries.append((user, Entry.of(tenant, event)))
            part.positions.append(position)
        self._open_parts.update(parts.values())
        return list(parts.values())

    def replace(self, part: "Part", parts: "Sequence[Part]") -> None:
        """What the part wanted, others want now; unless it is settled, and then nobody waits for those either."""
        if part in self._open_parts:
            self._open_parts.remove(part)
            self._open_parts.update(parts)

    def settle(self, part: "Part", answers: Sequence[AppendResult] | StorageError) -> None:
        """Note what became of a part; of a failed one there are no answers. Once it is settled, it stays so."""
        if part not in self._open_parts:
            return
        self._open_parts.remove(part)
        if isinstance(answers, StorageError):
            self.failure = self.failure or answers
        else:
            for position, answer in zip(part.positions, answers, strict=True):
                self._answers[position] = answer
        if not self._open_parts and not self.answer.done():
            self._reply()

    def _reply(self) -> None:
        applied = [position for position, answer in enumerate(self._answers) if answer is not None]
        if self.failure is None:
            self.answer.set_result([answer for answer in self._answers if answer is not None])
        elif applied:
            self.answer.set_exception(PartlyApplied(str(self.failure), applied))
        else:
            self.answer.set_exception(self.failure)


@dataclass(slots=True, eq=False)
class Part:
    """What a request wants in one partition: for each user applied as one, or not at all."""

    request: Request
    entries: list[tuple[User, Entry]] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)  # of the entries, in the request
    refusals: int = 0
    # What the archive has said: which ids it held when it held the partition's log through an entry.
    archived: set[tuple[User, int]] = field(default_factory=set)
    looked_through: int = 0
    must_look_through: int = 0
    give_up_at_s: float = field(default_factory=lambda: asyncio.get_running_loop().time() + GIVE_UP_AFTER_S)

    @property
    def size(self) -> int:
        return len(self.entries)

    @property
    def users(self) -> Iterator[User]:
        return (user for user, _ in self.entries)

    @property
    def log(self) -> str:
        return self.entries[0][0].log

    @property
    def partition(self) -> int:
        return self.entries[0][0].partition_number

    def is_dropped(self) -> bool:
        """Nobody waits any more, or the request has failed in another part, which settles this one."""
        if self.request.failure is not None:
            self.request.settle(self, self.request.failure)
            return True
        return self.request.answer.done()

    def is_too_late(self) -> bool:
        """The server is so slow that nobody should wait any longer."""
        late = asyncio.get_running_loop().time() > self.give_up_at_s
        if late:
            self.fail(StorageUnavailable("Redis answers too slowly"))
        return late

    def succeed(self, answers: Sequence[AppendResult]) -> None:
        self.request.settle(self, answers)

    def fail(self, cause: Exception) -> None:
        self.request.settle(self, failure_of(cause))

    def has_moved(self, folds: "dict[User, UserFold]") -> bool:
        return any(len(head := folds[user].head or b"") > MARK and Head.of(head).move for user in self.users)

    def readdressed(self, roots: "dict[User, User]") -> "list[Part]":
        """Parts that want the same, of those whom the users have become."""
        parts: dict[str, Part] = {}
        for (user, entry), position in zip(self.entries, self.positions, strict=True):
            root = roots[user]
            part = parts.setdefault(root.partition, Part(self.request, give_up_at_s=self.give_up_at_s))
            moved = entry if root == user else Entry.of(root.tenant, readdressed(entry.event, root.user_id))
            part.entries.append((root, moved))
            part.positions.append(position)
        self.request.replace(self, list(parts.values()))
        return list(parts.values())

    def without(self, users: Set[User]) -> "list[Part]":
        """Let go of what is wanted for these users: a part of its own, if there is any."""
        other = Part(self.request, refusals=self.refusals, give_up_at_s=self.give_up_at_s)
        mine = list(zip(self.entries, self.positions, strict=True))
        self.entries, self.positions = [], []
        for (user, entry), position in mine:
            part = other if user in users else self
            part.entries.append((user, entry))
            part.positions.append(position)
        if not other.entries:
            return []
        self.request.replace(self, [self, other])
        return [other]

    def is_undecided(self, folds: "dict[User, UserFold]") -> bool:
        """Whether the archive has to say which of the entries were logged, and has not said so yet."""
        if all(len(folds[user].head or b"") <= SEQ_DIGITS for user in self.users):
            return False  # nothing of them was ever archived
        self.must_look_through = max((Head.of(folds[user].head).archived for user in self.users), default=0)
        return self.looked_through < self.must_look_through and any(
            Head.of(folds[user].head).may_be_archived(entry.event.event_id) and not folds[user].knows(entry)
            for user, entry in self.entries
        )

    def may_try_again(self, why: str) -> bool:
        self.refusals += 1
        if asyncio.get_running_loop().time() < self.give_up_at_s:
            return True
        self.fail(StorageUnavailable(f"{self.refusals} times {why}"))
        return False


@dataclass(slots=True)
class UserFold:
    """A user as stored, and then with new entries folded in."""

    user: User
    serving: Sequence[Generation]
    head: bytes | None = None
    stored: list[bytes | None] = field(default_factory=list)  # a value for each generation
    states: dict[bytes, bytes] = field(default_factory=dict)  # by generation, without those that are far behind
    seen: set[int] = field(default_factory=set)  # hashes of ids that are certainly logged; the script knows all
    new: list[Entry] = field(default_factory=list)
    late: set[int] = field(
        default_factory=set
    )  # hashes of the ids of those new ones that the first generation calls so
    is_corrected: bool = False  # by one of those new ones
    failure: Exception | None = None  # why it cannot be read

    def knows(self, entry: Entry) -> bool:
        """Whether the entry is certainly logged; only the script knows all that are."""
        return entry.id_hash in self.seen or any(
            generation.remembers(self.states[generation.tag], entry.id_hash)
            for generation in self.serving
            if generation.tag in self.states
        )

    def receive(self, entry: Entry) -> bool:
        """Whether the entry is new, as far as is known."""
        if self.knows(entry):
            return False
        self.seen.add(entry.id_hash)
        self.new.append(entry)
        if is_correction(entry.event):
            self.is_corrected = True
            self.states.clear()  # who next needs them folds them
        return True

    def answer(self, entry: Entry) -> AppendResult:
        """Of a new entry, which has been folded in."""
        if is_correction(entry.event):
            return AppendResult()
        unknown_item = not self.serving[0].knows_item_of(entry.event)
        return AppendResult(unknown_item=unknown_item, late=entry.id_hash in self.late)

    def change(self) -> Change:
        states = {
            self.user.state(generation): self.states[generation.tag]
            for generation in self.serving
            if generation.tag in self.states
        }
        return Change(self.user, self.head or b"", self.new, states)


def fold_new(serving: Sequence[Generation], folds: Sequence[UserFold]) -> None:
    """Fold what is new of all of the users into their states."""
    for generation in serving:
        own = [fold for fold in folds if fold.new and generation.tag in fold.states]
        entries = [entry for fold in own for entry in fold.new]
        if not entries:
            continue
        users = [place for place, fold in enumerate(own) for _ in fold.new]
        folded, late = fold_encoded(
            generation,
            [fold.states[generation.tag] for fold in own],
            users,
            [entry.event for entry in entries],
            [entry.id_hash for entry in entries],
        )
        for fold, value in zip(own, folded, strict=True):
            fold.states[generation.tag] = value
        if generation is serving[0]:
            for place, entry in compress(zip(users, entries, strict=True), late):
                own[place].late.add(entry.id_hash)


@dataclass(frozen=True, slots=True)
class Commit:
    """Parts of one partition, and what is to change for them. Each user's change is applied or refused by itself."""

    parts: list[Part]
    is_new: list[list[bool]]  # of the parts' entries
    folds: Mapping[User, UserFold]

    @property
    def partition(self) -> str:
        return next(self.parts[0].users).partition

    @property
    def changes(self) -> list[Change]:
        """Of users with new entries."""
        return [fold.change() for fold in self.folds.values() if fold.new]

    def settle(self, replies: Sequence[Any] | Exception) -> list[Part]:
        """Given a reply for each change, returns the parts that have to wait for the next round."""
        if isinstance(replies, TryAgainError):
            return self._again(self.parts, "the cluster was moving the users' partition")
        if isinstance(replies, MovedError | NoScriptError):
            # a node that has the partition only now may lack what the fold began with
            return self._again(self.parts, "the users' partition was elsewhere")
        if isinstance(replies, Exception):
            return self._fail(replies)
        odd = [reply for reply in replies if isinstance(reply, bytes)]
        if odd:
            return self._fail(ResponseError(odd[0].decode()))
        changed = (fold.user for fold in self.folds.values() if fold.new)
        refused = {user for user, reply in zip(changed, replies, strict=True) if reply == 0}
        again: list[Part] = []
        for part, is_new in zip(self.parts, self.is_new, strict=True):
            if refused:
                is_new = [new for new, user in zip(is_new, part.users, strict=True) if user not in refused]
                again += part.without(refused)
            part.succeed(
                [
                    self.folds[user].answer(entry) if new else DUPLICATE
                    for new, (user, entry) in zip(is_new, part.entries, strict=True)
                ]
            )
        return self._again(again, "others were faster with events of the same users")

    def _fail(self, cause: Exception) -> list[Part]:
        for part in self.parts:
            part.fail(cause)
        return []

    def _again(self, parts: Sequence[Part], why: str) -> list[Part]:
        return [part for part in parts if part.may_try_again(why)]


def by_partition(parts: Sequence[Part]) -> list[list[Part]]:
    together: defaultdict[str, list[Part]] = defaultdict(list)
    for part in parts:
        together[next(part.users).partition].append(part)
    return list(together.values())
