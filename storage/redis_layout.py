"""What lies in Redis: keys, values, and the two scripts that work on them.

All keys of one partition share a hash tag and so, in a cluster, a slot. A user belongs to one partition. TENANT is
percent-encoded, so that the first "/" ends it.

  PREFIX:meta                           hash    layout version and number of partitions
  PREFIX:{p17}:seq                      string  how many entries the partition's log ever got; never goes back
  PREFIX:{p17}:log                      stream  entry id SEQ-MS, MS being the time; one field "e", see `Entry`
  PREFIX:{p17}:head:TENANT/USER         string  SEQ of the user's newest entry, 16 digits
  PREFIX:{p17}:index:TENANT/USER        zset    the user's entries: 8 bytes of hash of the event id, scored SEQ
  PREFIX:{p17}:state:TAG:TENANT/USER    string  SEQ of the newest entry that is folded in, 16 digits; encoded state;
                                                expires where the store was told so
  PREFIX:generations                    hash    TAG -> name of its model directory
  PREFIX:live:TAG                       string  there, for a while, as long as some process serves or builds it
  PREFIX:active                         string  TAG, a space and name of the generation that every process is to serve

No SEQ is ever used twice. So an unchanged head means an unchanged log, also when the user was erased in between, and a
state is the fold of the log exactly if it begins with the head.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha1
from typing import TypeAlias
from urllib.parse import quote
from zlib import crc32

from storage.state import Event, Generation, event_fields, event_hash
from storage.store import LogEntry, StorageError

LAYOUT_VERSION = 1
SEQ_DIGITS = 16  # more than the 53 bits that a score holds exactly

Argument: TypeAlias = str | bytes | int
_compact_json = json.JSONEncoder(separators=(",", ":")).encode


class Script:
    """Of Lua, to be called by its hash."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = sha1(text.encode(), usedforsecurity=False).hexdigest()


# Applies everything (1) or, where a user's log is not what the caller believes, nothing (0). All is checked before the
# first write, and a server that is full or read-only refuses already that one.
COMMIT = Script("""
-- KEYS  seq, log; for each user: head, index, states
-- ARGV  seconds until a state expires, 0 = never; for each user: believed head, number of states and of new entries,
--       states, id hash and entry of each
local ttl_s = tonumber(ARGV[1])
local key, arg, total = 3, 2, 0
while key < #KEYS do
    if (redis.call('GET', KEYS[key]) or '') ~= ARGV[arg] then return 0 end
    local states, new = tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2])
    arg = arg + 3 + states
    for _ = 1, new do
        if redis.call('ZSCORE', KEYS[key + 1], ARGV[arg]) then return 0 end
        arg = arg + 2
    end
    key, total = key + 2 + states, total + new
end

local time = redis.call('TIME')
local id_end = string.format('-%s%03d', time[1], math.floor(time[2] / 1000))
local seq = redis.call('INCRBY', KEYS[1], total) - total
key, arg = 3, 2
while key < #KEYS do
    local head, states, new, first_state = ARGV[arg], tonumber(ARGV[arg + 1]), tonumber(ARGV[arg + 2]), arg + 3
    arg = first_state + states
    for _ = 1, new do
        seq = seq + 1
        redis.call('XADD', KEYS[2], string.format('%.0f', seq) .. id_end, 'e', ARGV[arg + 1])
        redis.call('ZADD', KEYS[key + 1], seq, ARGV[arg])
        arg = arg + 2
    end
    if new > 0 then
        head = string.format('%016.0f', seq)
        redis.call('SET', KEYS[key], head)
    end
    for i = 0, states - 1 do
        redis.call('SET', KEYS[key + 2 + i], head .. ARGV[first_state + i])
        if ttl_s > 0 then redis.call('EXPIRE', KEYS[key + 2 + i], ttl_s) end
    end
    key = key + 2 + states
end
return 1
""")

# Keeps the fold of a user's log through an entry that is still in the log, unless one further on is kept already.
KEEP = Script("""
-- KEYS  index, state
-- ARGV  the entry, as 16 digits, the state, and seconds until it expires, 0 = never
if #redis.call('ZRANGEBYSCORE', KEYS[1], ARGV[1], ARGV[1]) == 0 then return 0 end
local kept = redis.call('GETRANGE', KEYS[2], 0, 15)
local is_further_on = tonumber(kept) and tonumber(kept) > tonumber(ARGV[1])
if is_further_on and #redis.call('ZRANGEBYSCORE', KEYS[1], kept, kept) > 0 then return 0 end
redis.call('SET', KEYS[2], ARGV[1] .. ARGV[2])
if tonumber(ARGV[3]) > 0 then redis.call('EXPIRE', KEYS[2], ARGV[3]) end
return 1
""")

READ_LOG = Script("""
-- KEYS  index, log
-- ARGV  after, through, limit
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. ARGV[1], ARGV[2], 'WITHSCORES', 'LIMIT', 0, ARGV[3])
for i = 1, #found, 2 do
    local seq = found[i + 1]
    local entry = redis.call('XRANGE', KEYS[2], seq, seq)[1]
    found[i], found[i + 1] = seq, entry and entry[2][2] or ''
end
return found
""")


class Keyspace:
    """The keys under one prefix."""

    def __init__(self, prefix: str, partitions: int) -> None:
        if not prefix or set(prefix) & set("{}") or partitions < 1:
            raise ValueError(f"a key prefix without braces and a partition are needed, not {prefix!r} and {partitions}")
        self.meta = f"{prefix}:meta"
        self.generations = f"{prefix}:generations"
        self.active = f"{prefix}:active"
        self.partitions = partitions
        self._prefix = prefix

    def live(self, tag: bytes) -> str:
        return f"{self._prefix}:live:{tag.hex()}"

    def states_pattern(self, tag: bytes) -> str:
        """Of SCAN: every state of the generation."""
        return f"{_literal(self._prefix)}:{{p*}}:state:{tag.hex()}:*"

    def partition(self, number: int) -> str:
        return f"{self._prefix}:{{p{number}}}"

    def user(self, tenant: str, user_id: str) -> "User":
        """raises StorageError when the ids are not Unicode"""
        try:
            name = f"{quote(tenant, safe='')}/{user_id}"
            partition = crc32(name.encode()) % self.partitions
        except UnicodeEncodeError as exc:
            raise StorageError(f"an id cannot be stored: {exc}") from exc
        return User(self.partition(partition), name)


def _literal(text: str) -> str:
    """As a part of a pattern that stands for just this text."""
    return re.sub(r"([*?\[\]\\^])", r"\\\1", text)


@dataclass(frozen=True, slots=True)
class User:
    partition: str  # PREFIX:{p17}
    name: str  # TENANT/USER

    @property
    def head(self) -> str:
        return f"{self.partition}:head:{self.name}"

    @property
    def index(self) -> str:
        return f"{self.partition}:index:{self.name}"

    @property
    def log(self) -> str:
        return f"{self.partition}:log"

    def state(self, generation: Generation) -> str:
        return f"{self.partition}:state:{generation.tag.hex()}:{self.name}"

    def states(self, generations: Sequence[Generation]) -> list[str]:
        return [self.state(generation) for generation in generations]


@dataclass(frozen=True, slots=True)
class Entry:
    """An event as it enters the log."""

    event: Event
    id_hash: int
    encoded: str

    @classmethod
    def of(cls, tenant: str, event: Event) -> "Entry":
        """raises StorageError when the event cannot be encoded or folded, before others have to suffer for it"""
        try:
            event.timestamp_us.to_bytes(8, "little", signed=True)
            return cls(event, event_hash(event.event_id), _compact_json((tenant, *event_fields(event))))
        except (ValueError, TypeError, OverflowError) as exc:
            raise StorageError(f"an event cannot be stored: {exc!r}") from exc

    @property
    def member(self) -> bytes:
        """Of the index."""
        return self.id_hash.to_bytes(8, "little")


@dataclass(frozen=True, slots=True)
class Change:
    """What is committed for one user: new entries, and the states that they are folded into, by their keys."""

    user: User
    head: bytes  # through which the states held the log before; empty without a log
    entries: Sequence[Entry]
    states: Mapping[str, bytes]


def commit_arguments(changes: Sequence[Change], ttl_s: int) -> tuple[list[str], list[Argument]]:
    """KEYS and ARGV of COMMIT for users of one partition."""
    partition = changes[0].user.partition
    keys = [f"{partition}:seq", f"{partition}:log"]
    args: list[Argument] = [ttl_s]
    for change in changes:
        keys += [change.user.head, change.user.index, *change.states]
        args += [change.head, len(change.states), len(change.entries), *change.states.values()]
        for entry in change.entries:
            args += [entry.member, entry.encoded]
    return keys, args


def keep_arguments(
    user: User, generation: Generation, through_seq: int, value: bytes, ttl_s: int
) -> tuple[list[str], list[Argument]]:
    """KEYS and ARGV of KEEP."""
    return [user.index, user.state(generation)], [f"{through_seq:0{SEQ_DIGITS}}", value, ttl_s]


def log_entries(user: User, found: Iterable[bytes]) -> Iterator[LogEntry]:
    """The entries in an answer of READ_LOG."""
    fields = iter(found)
    for seq, encoded in zip(fields, fields, strict=True):
        if not encoded:
            raise StorageError(f"'{user.log}' has lost its entry {int(seq)}")
        _tenant, *columns = json.loads(encoded)
        yield LogEntry(int(seq), Event(*columns))


def partition_entries(found: Iterable[tuple[bytes, Mapping[bytes, bytes]]]) -> Iterator[tuple[str, LogEntry]]:
    """The entries in an answer of XRANGE, each with its tenant."""
    for entry_id, fields in found:
        tenant, *columns = json.loads(fields[b"e"])
        yield tenant, LogEntry(int(entry_id.partition(b"-")[0]), Event(*columns))
