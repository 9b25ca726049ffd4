"""What waits for a round of the Redis store, and how whoever asked for it is answered."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import TryAgainError

from storage.corrections import is_correction, readdressed
from storage.redis_layout import Change, Entry, Head, Keyspace, User
from storage.redis_servers import failure_of
from storage.state import Effect, Event, Generation, State
from storage.store import Appended, PartlyApplied, StorageError, StorageUnavailable

GIVE_UP_AFTER_S = 5.0


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
        self.answer: asyncio.Future[list[Appended]] = asyncio.get_running_loop().create_future()
        self.failure: StorageError | None = None
        self._answers: list[Appended | None] = [None] * size
        self._open_parts: set[Part] = set()

    def parts(self, keys: Keyspace, tenant: str, events: Sequence[Event]) -> "list[Part]":
        parts: dict[str, Part] = {}
        for position, event in enumerate(events):
            user = keys.user(tenant, event.user_id)
            part = parts.setdefault(user.partition, Part(self))
            part.entries.append((user, Entry.of(tenant, event)))
            part.positions.append(position)
        self._open_parts.update(parts.values())
        return list(parts.values())

    def replace(self, part: "Part", parts: "Sequence[Part]") -> None:
        """What the part wanted, others want now; unless it is settled, and then nobody waits for those either."""
        if part in self._open_parts:
            self._open_parts.remove(part)
            self._open_parts.update(parts)

    def settle(self, part: "Part", answers: Sequence[Appended] | StorageError) -> None:
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
    """What a request wants in one partition: applied as one, or not at all."""

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

    def succeed(self, answers: Sequence[Appended]) -> None:
        self.request.settle(self, answers)

    def fail(self, cause: Exception) -> None:
        self.request.settle(self, failure_of(cause))

    def has_moved(self, folds: "dict[User, UserFold]") -> bool:
        return any(Head.of(folds[user].head).move is not None for user in self.users)

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

    def is_undecided(self, folds: "dict[User, UserFold]") -> bool:
        """Whether the archive has to say which of the entries were logged, and has not said so yet."""
        self.must_look_through = max((Head.of(folds[user].head).archived for user in self.users), default=0)
        return self.looked_through < self.must_look_through and any(
            Head.of(folds[user].head).may_be_archived(entry.event.event_id) and entry.id_hash not in folds[user].seen
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
    states: dict[bytes, State] = field(default_factory=dict)  # by generation, without those that are far behind
    seen: set[int] = field(default_factory=set)  # hashes of ids that are certainly logged; the script knows all
    new: list[Entry] = field(default_factory=list)
    failure: Exception | None = None  # why it cannot be read

    def receive(self, entry: Entry) -> Appended:
        if entry.id_hash in self.seen:
            return Appended(duplicate=True)
        self.seen.add(entry.id_hash)
        self.new.append(entry)
        if is_correction(entry.event):
            self.states.clear()  # who next needs them folds them
            return Appended()
        effects = {
            generation.tag: generation.apply(self.states[generation.tag], entry.event)
            for generation in self.serving
            if generation.tag in self.states
        }
        first = self.serving[0]
        return Appended(
            unknown_item=entry.event.item_id not in first.item_index,
            late=effects.get(first.tag) is Effect.STEPPED_LATE,
        )

    def change(self) -> Change:
        states = {
            self.user.state(generation): generation.encode(self.states[generation.tag])
            for generation in self.serving
            if generation.tag in self.states
        }
        return Change(self.user, self.head or b"", self.new, states)


@dataclass(frozen=True, slots=True)
class Commit:
    """Parts of one partition that are applied together."""

    parts: list[Part]
    answers: list[list[Appended]]
    changes: list[Change]  # of users with new entries

    @property
    def partition(self) -> str:
        return next(self.parts[0].users).partition

    def settle(self, reply: Any) -> list[Part]:
        """Returns the parts that have to wait for the next round."""
        if reply == 0:
            return self._again("others were faster with events of the same users")
        if isinstance(reply, TryAgainError):
            return self._again("the cluster was moving the users' partition")
        for part, answers in zip(self.parts, self.answers, strict=True):
            if reply == 1:
                part.succeed(answers)
            else:
                part.fail(reply)
        return []

    def _again(self, why: str) -> list[Part]:
        return [part for part in self.parts if part.may_try_again(why)]


def by_partition(parts: Sequence[Part]) -> list[list[Part]]:
    together: defaultdict[str, list[Part]] = defaultdict(list)
    for part in parts:
        together[next(part.users).partition].append(part)
    return list(together.values())
