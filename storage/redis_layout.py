"""What lies in Redis: keys, values, and the scripts that work on them.

All keys of one partition share a hash tag and so, in a cluster, a slot. A user belongs to one partition. TENANT is
percent-encoded, so that the first "/" ends it.

  PREFIX:meta                           hash    layout version, number of partitions, id of the archive if there is one,
                                                "generation:TAG" for every generation that there ever was a state of,
                                                "items:TENANT" for every tenant that has said anything of items,
                                                "secret", 64 hex digits that are made once
  PREFIX:{p17}:seq                      string  how many entries the partition's log ever got; never goes back
  PREFIX:{p17}:log                      stream  entry id SEQ-MS, MS being the time; one field: "e", see `Entry`, or "x":
                                                a user erased, see `erasure`, or empty: what was an entry of that user
  PREFIX:{p17}:head:TENANT/USER         string  SEQ of the user's newest entry, 16 digits; once entries were trimmed,
                                                see `Head`: SEQ through which to ask the archive, 16 digits, and the
                                                newest time of a UUIDv7 among the ids trimmed, 10 digits of seconds
                                                of who has become another user, 42 digits, a mark and that USER
  PREFIX:{p17}:aliases:TENANT/USER      set     USERs who have become this one, or are about to
  PREFIX:{p17}:index:TENANT/USER        zset    the user's entries: 8 bytes of hash of the event id, scored SEQ
  PREFIX:{p17}:state:TAG:TENANT/USER    string  SEQ of the newest entry that is folded in, 16 digits; encoded state;
                                                expires where the store was told so
  PREFIX:{items:TENANT}:version         string  how often anything was said of the tenant's items
  PREFIX:{items:TENANT}:changes         zset    item ids, scored with the version that said something of them last
  PREFIX:{items:TENANT}:title           hash    item id -> what was said last; the same for :categories, a JSON array,
                                                and :available, 0 or 1
  PREFIX:{items:TENANT}:trends          zset    item ids, scored with their trends, see storage/trends.py
  PREFIX:{items:TENANT}:tallies         hash    what is counted of the tenant, by name
  PREFIX:experiment:TENANT              string  what was noted of the tenant's experiment, if there is one
  PREFIX:generations                    hash    TAG -> name of its model directory
  PREFIX:live:TAG                       string  there, for a while, as long as some process serves or builds it
  PREFIX:active                         string  TAG, a space and name of the generation that every process is to serve
                                                The last three are the generations of the tenant `main`; those of others
                                                end in ":TENANT".

No SEQ is ever used twice. So an unchanged head means an unchanged log, also when the user was erased in between, and a
state is the fold of the log exactly if it begins with the head's SEQ.

Of a user's log, what is above the head's second number stands in stream and index, the rest in the archive. Trimming
changes the head, so a commit that was decided by what the archive held before is refused and decided again.
Layout 1 has no archive; the archiver makes it layout 2 before it trims the first entry. Layout 3, from the first undo
or merge on, may have one.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from hashlib import sha1
from typing import TypeAlias
from urllib.parse import quote, unquote
from zlib import crc32

from storage.errors import StorageError
from storage.records import MAIN_TENANT, LogEntry, LogPage
from storage.state import Generation
from storage.state_event import Event, digest, event_fields, event_hash, uuid7_time_us

LAYOUT_VERSION = 1
ARCHIVED_LAYOUT = 2
CORRECTED_LAYOUT = 3
KNOWN_LAYOUTS = (LAYOUT_VERSION, ARCHIVED_LAYOUT, CORRECTED_LAYOUT)
SEQ_DIGITS = 16  # more than the 53 bits that a score holds exactly
TIME_DIGITS = 10
LAST_TIME_S = 9_999_999_999
MARK = 2 * SEQ_DIGITS + TIME_DIGITS  # where a head has one

Argument: TypeAlias = str | bytes | int
_compact_json = json.JSONEncoder(separators=(",", ":")).encode


class Script:
    """Of Lua, to be called by its hash."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = sha1(text.encode(), usedforsecurity=False).hexdigest()


ADD_TALLIES = Script("""
-- KEYS  tallies
-- ARGV  of each: name, how many
for arg = 1, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[arg], ARGV[arg + 1]) end
return 1
""")

# Applies what there is of each user (1), or nothing where that user's log is not what the caller believes (0), or says
# why it could not. One call takes any number of partitions that are on the same server, in a cluster one. Of a
# partition all is checked before the first write, and a server that is full or read-only refuses already that one.
COMMIT = Script("""
-- KEYS  for each partition: seq, log; for each of its users: head, index, states
-- ARGV  seconds until a state expires, 0 = never; for each partition: number of users; for each of them: believed head,
--       number of states and of new entries, states, id hash and entry of each
local PAGE = 1000
local ttl_s, time = tonumber(ARGV[1]), redis.call('TIME')
local id_end = string.format('-%s%03d', time[1], math.floor(time[2] / 1000))

local function in_pages(work, list)
    for from = 1, #list, PAGE do work(from, unpack(list, from, math.min(from + PAGE - 1, #list))) end
end

local partitions, users, heads = {}, {}, {}
local key, arg = 1, 2
while key < #KEYS do
    local partition = {key = key, first = #users + 1}
    local count = tonumber(ARGV[arg])
    key, arg = key + 2, arg + 1
    for _ = 1, count do
        local user = {key = key, head = ARGV[arg], states = tonumber(ARGV[arg + 1]), new = tonumber(ARGV[arg + 2])}
        user.first_state = arg + 3
        user.first_new = user.first_state + user.states
        users[#users + 1], heads[#heads + 1] = user, KEYS[key]
        key, arg = key + 2 + user.states, user.first_new + 2 * user.new
    end
    partition.last = #users
    partitions[#partitions + 1] = partition
end
in_pages(function(from, ...)
    for i, head in ipairs(redis.call('MGET', ...)) do heads[from + i - 1] = head or '' end
end, heads)

local function is_as_believed(number)
    local user = users[number]
    if heads[number] ~= user.head then return false end
    for new = user.first_new, user.first_new + 2 * user.new - 2, 2 do
        if redis.call('ZSCORE', KEYS[user.key + 1], ARGV[new]) then return false end
    end
    return true
end

local replies, values, kept = {}, {}, {}
local function apply(partition)
    local total = 0
    for number = partition.first, partition.last do
        users[number].applies = is_as_believed(number)
        if users[number].applies then total = total + users[number].new end
    end
    local seq = redis.call('INCRBY', KEYS[partition.key], total) - total
    for number = partition.first, partition.last do
        local user = users[number]
        if user.applies then
            local head = user.head
            for new = user.first_new, user.first_new + 2 * user.new - 2, 2 do
                seq = seq + 1
                redis.call('XADD', KEYS[partition.key + 1], string.format('%.0f', seq) .. id_end, 'e', ARGV[new + 1])
                redis.call('ZADD', KEYS[user.key + 1], seq, ARGV[new])
            end
            if user.new > 0 then
                head = string.format('%016.0f', seq) .. string.sub(head, 17)
                values[#values + 1], values[#values + 2] = KEYS[user.key], head
            end
            for i = 0, user.states - 1 do
                local state = KEYS[user.key + 2 + i]
                values[#values + 1] = state
                values[#values + 1] = string.sub(head, 1, 16) .. ARGV[user.first_state + i]
                kept[#kept + 1] = state
            end
        end
        replies[number] = user.applies and 1 or 0
    end
end

for _, partition in ipairs(partitions) do
    local is_done, why = pcall(apply, partition)  -- what is odd in one partition is nothing to the others
    if not is_done then
        for number = partition.first, partition.last do
            replies[number] = type(why) == 'table' and why.err or tostring(why)
        end
        if partition.first > partition.last then error(why) end
    end
end
in_pages(function(_, ...) redis.call('MSET', ...) end, values)
if ttl_s > 0 then
    for _, state in ipairs(kept) do redis.call('EXPIRE', state, ttl_s) end
end
return replies
""")

# Keeps the fold of a user's log through an entry that is still in it, unless one further on is kept already. An entry
# that is archived counts only as the newest: it might be of a user who was erased and came back.
KEEP = Script("""
-- KEYS  head, index, state
-- ARGV  the entry, as 16 digits, the state, and seconds until it expires, 0 = never
local newest = string.sub(redis.call('GET', KEYS[1]) or '', 1, 16)
local function is_logged(seq)
    return seq == newest or #redis.call('ZRANGEBYSCORE', KEYS[2], seq, seq) > 0
end
if not is_logged(ARGV[1]) then return 0 end
local kept = redis.call('GETRANGE', KEYS[3], 0, 15)
local is_further_on = tonumber(kept) and tonumber(kept) > tonumber(ARGV[1])
if is_further_on and is_logged(kept) then return 0 end
redis.call('SET', KEYS[3], ARGV[1] .. ARGV[2])
if tonumber(ARGV[3]) > 0 then redis.call('EXPIRE', KEYS[3], ARGV[3]) end
return 1
""")

# Returns pairs of SEQ and entry; or, where the archive has to be asked first, the SEQ through which to ask it, alone.
READ_LOG = Script("""
-- KEYS  head, index, log
-- ARGV  after, through, limit
local archived = string.sub(redis.call('GET', KEYS[1]) or '', 17, 32)
if archived ~= '' and tonumber(ARGV[1]) < tonumber(archived) then return {archived} end
local found = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. ARGV[1], ARGV[2], 'WITHSCORES', 'LIMIT', 0, ARGV[3])
for i = 1, #found, 2 do
    local seq = found[i + 1]
    local entry = redis.call('XRANGE', KEYS[3], seq, seq)[1]
    found[i], found[i + 1] = seq, entry and entry[2][2] or ''
end
return found
""")

# Lets go of a partition's entries through one that is archived, as are all before it. Doing it again changes nothing.
# Who was erased since the entries were read, and came back, has none of them, and nothing to ask the archive for.
TRIM = Script("""
-- KEYS  log; for each user who has such entries: head, index
-- ARGV  SEQ of the entry and of the one after it; for each user: newest time of a UUIDv7 among the ids, 10 digits
local through = string.format('%016.0f', tonumber(ARGV[1]))
for user = 1, #ARGV - 2 do
    local head, time = redis.call('GET', KEYS[2 * user]), ARGV[user + 2]
    if head and redis.call('ZREMRANGEBYSCORE', KEYS[2 * user + 1], '-inf', ARGV[1]) > 0 then
        local archived, known_time, moved = string.sub(head, 17, 32), string.sub(head, 33, 42), string.sub(head, 43)
        if archived < through then archived = through end
        if known_time > time then time = known_time end
        redis.call('SET', KEYS[2 * user], string.sub(head, 1, 16) .. archived .. time .. moved)
    end
end
return redis.call('XTRIM', KEYS[1], 'MINID', '=', ARGV[2])
""")


# Forgets a user, and writes to the log that it did. What XDEL takes out of a stream stays in its memory and dumps, so
# the partition's log is written anew; the numbers of the user's entries stay, as the archiver goes by them.
ERASE = Script("""
-- KEYS  seq, log, scratch, aliases, head, index; states
-- ARGV  what to log
if redis.call('EXISTS', KEYS[4], KEYS[5]) == 0 then return 0 end
local gone = {}
for _, seq in ipairs(redis.call('ZRANGE', KEYS[6], 0, -1, 'WITHSCORES')) do gone[seq] = true end
local time = redis.call('TIME')
local id = string.format('%.0f', redis.call('INCRBY', KEYS[1], 1))
redis.call('XADD', KEYS[2], id .. string.format('-%s%03d', time[1], math.floor(time[2] / 1000)), 'x', ARGV[1])
redis.call('DEL', KEYS[3])
local after = '-'
repeat
    local page = redis.call('XRANGE', KEYS[2], after, '+', 'COUNT', 500)
    for _, entry in ipairs(page) do
        local field, value = entry[2][1], entry[2][2]
        if gone[string.match(entry[1], '^%d+')] then field, value = 'x', '' end
        redis.call('XADD', KEYS[3], entry[1], field, value)
        after = '(' .. entry[1]
    end
until #page == 0
redis.call('RENAME', KEYS[3], KEYS[2])
for key = 5, #KEYS do redis.call('DEL', KEYS[key]) end
return 1
""")

# Appends entries whose ids a user's log lacks, if that is as the caller believes. Who has no log has no head, before or
# after being erased: then the partition's log has to be as believed.
APPEND = Script("""
-- KEYS  seq, log, head, index
-- ARGV  believed head and SEQ of the partition's newest entry; id hash and entry of each
local head, seq = redis.call('GET', KEYS[3]) or '', tonumber(redis.call('GET', KEYS[1]) or '0')
if head ~= ARGV[1] or (head == '' and seq ~= tonumber(ARGV[2])) then return 0 end
local time = redis.call('TIME')
local id_end = string.format('-%s%03d', time[1], math.floor(time[2] / 1000))
for new = 3, #ARGV, 2 do
    seq = redis.call('INCRBY', KEYS[1], 1)
    redis.call('XADD', KEYS[2], string.format('%.0f', seq) .. id_end, 'e', ARGV[new + 1])
    redis.call('ZADD', KEYS[4], seq, ARGV[new])
end
redis.call('SET', KEYS[3], string.format('%016.0f', seq) .. string.sub(head, 17))
return 1
""")

# Changes the mark of a head that is as the caller believes. With an entry, that is logged as the user's last one, and
# the states go, as nobody will ask for them again. Without entries and without a mark there is no head.
MOVE = Script("""
-- KEYS  seq, log, head, index; states
-- ARGV  believed head, mark and user or nothing; where there is an entry, id hash and entry
local head = redis.call('GET', KEYS[3]) or ''
if head ~= ARGV[1] then return 0 end
head = string.sub(head .. string.rep('0', 42 - #head), 1, 42)
if ARGV[3] then
    local time = redis.call('TIME')
    local seq = redis.call('INCRBY', KEYS[1], 1)
    local id = string.format('%.0f-%s%03d', seq, time[1], math.floor(time[2] / 1000))
    redis.call('XADD', KEYS[2], id, 'e', ARGV[4])
    redis.call('ZADD', KEYS[4], seq, ARGV[3])
    head = string.format('%016.0f', seq) .. string.sub(head, 17)
    for key = 5, #KEYS do redis.call('DEL', KEYS[key]) end
end
if ARGV[2] == '' and tonumber(string.sub(head, 1, 16)) == 0 then
    redis.call('DEL', KEYS[3])
else
    redis.call('SET', KEYS[3], head .. ARGV[2])
end
return 1
""")

# No version of lisarec that knows less may be started over these data from now on.
RAISE_LAYOUT = Script("""
-- KEYS  meta
-- ARGV  layout
if tonumber(redis.call('HGET', KEYS[1], 'layout') or '0') < tonumber(ARGV[1]) then
    redis.call('HSET', KEYS[1], 'layout', ARGV[1])
end
""")


class Keyspace:
    """The keys under one prefix."""

    def __init__(self, prefix: str, partitions: int) -> None:
        if not prefix or set(prefix) & set("{}") or partitions < 1:
            raise ValueError(f"a key prefix without braces and a partition are needed, not {prefix!r} and {partitions}")
        self.meta = f"{prefix}:meta"
        self.partitions = partitions
        self._prefix = prefix
        self._partitions = [self.partition(number) for number in range(partitions)]

    def generations(self, tenant: str) -> str:
        return f"{self._prefix}:generations{_suffix(tenant)}"

    def active(self, tenant: str) -> str:
        return f"{self._prefix}:active{_suffix(tenant)}"

    def live(self, tenant: str, tag: bytes) -> str:
        return f"{self._prefix}:live:{tag.hex()}{_suffix(tenant)}"

    def items(self, tenant: str) -> "ItemKeys":
        return ItemKeys(f"{self._prefix}:{{items:{quote(tenant, safe='')}}}")

    def tallies(self, tenant: str) -> str:
        return f"{self.items(tenant).place}:tallies"

    def experiment(self, tenant: str) -> str:
        return f"{self._prefix}:experiment:{quote(tenant, safe='')}"

    def trends(self, tenant: str) -> str:
        return f"{self.items(tenant).place}:trends"

    def states_pattern(self, tenant: str, tag: bytes) -> str:
        """Of SCAN: every state of the generation that is the tenant's."""
        return f"{_literal(self._prefix)}:{{p*}}:state:{tag.hex()}:{quote(tenant, safe='')}/*"

    def partition(self, number: int) -> str:
        return f"{self._prefix}:{{p{number}}}"

    def log(self, partition: int) -> str:
        return f"{self.partition(partition)}:log"

    def user(self, tenant: str, user_id: str) -> "User":
        """raises StorageError when the ids are not Unicode"""
        try:
            name = f"{_encoded(tenant)}/{user_id}"
            partition = crc32(name.encode()) % self.partitions
        except UnicodeEncodeError as exc:
            raise StorageError(f"an id cannot be stored: {exc}") from exc
        return User(self._partitions[partition], name)


@cache
def _encoded(tenant: str) -> str:
    return quote(tenant, safe="")


def _suffix(tenant: str) -> str:
    """Of keys that were there before tenants had generations of their own, which were those of `main`."""
    return "" if tenant == MAIN_TENANT else f":{quote(tenant, safe='')}"


def _literal(text: str) -> str:
    """As a part of a pattern that stands for just this text."""
    return re.sub(r"([*?\[\]\\^])", r"\\\1", text)


@dataclass(frozen=True, slots=True)
class ItemKeys:
    """What a tenant says of items, in one slot."""

    place: str  # PREFIX:{items:TENANT}

    @property
    def version(self) -> str:
        return f"{self.place}:version"

    @property
    def changes(self) -> str:
        return f"{self.place}:changes"

    @property
    def parts(self) -> list[str]:
        """In the order of an ItemEntry's fields."""
        return [f"{self.place}:{part}" for part in ("title", "categories", "available")]


@dataclass(frozen=True, slots=True)
class User:
    partition: str  # PREFIX:{p17}
    name: str  # TENANT/USER

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def tenant(self) -> str:
        return unquote(self.name.partition("/")[0])

    @property
    def user_id(self) -> str:
        return self.name.partition("/")[2]

    @property
    def partition_number(self) -> int:
        return int(self.partition.rpartition(":{p")[2].removesuffix("}"))

    @property
    def head(self) -> str:
        return f"{self.partition}:head:{self.name}"

    @property
    def index(self) -> str:
        return f"{self.partition}:index:{self.name}"

    @property
    def aliases(self) -> str:
        return f"{self.partition}:aliases:{self.name}"

    @property
    def seq(self) -> str:
        return f"{self.partition}:seq"

    @property
    def log(self) -> str:
        return f"{self.partition}:log"

    def state(self, generation: Generation) -> str:
        return self.state_of_tag(generation.tag.hex())

    def state_of_tag(self, tag: str) -> str:
        return f"{self.partition}:state:{tag}:{self.name}"

    def states(self, generations: Sequence[Generation]) -> list[str]:
        return [self.state(generation) for generation in generations]


class Move(Enum):
    """The mark in a head."""

    PROPOSED = "?"
    DECIDED = ">"
    DONE = "="


@dataclass(frozen=True, slots=True)
class Head:
    """How far a user's log goes, and which part of it the archive has to be asked for.

    newest      SEQ of the newest entry, 0 without a log
    archived    SEQ; entries up to it are in the archive and no longer here
    id_time_s   the newest time of a UUIDv7 among the ids up to there, rounded up
    move        how far it is with becoming another user, see storage/redis_corrections.py; none for almost everybody
    target      the id of that user
    """

    newest: int = 0
    archived: int = 0
    id_time_s: int = 0
    move: "Move | None" = None
    target: str = ""

    @classmethod
    def of(cls, value: bytes | None) -> "Head":
        if not value:
            return cls()
        archived, time_s = value[SEQ_DIGITS : 2 * SEQ_DIGITS], value[2 * SEQ_DIGITS : MARK]
        move = Move(value[MARK : MARK + 1].decode()) if len(value) > MARK else None
        return cls(int(value[:SEQ_DIGITS]), int(archived or 0), int(time_s or 0), move, value[MARK + 1 :].decode())

    def may_be_archived(self, event_id: str) -> bool:
        """Whether only the archive can say that the user's log does not have this id.

        A UUIDv7 tells by itself that it is younger than all that was trimmed. Any other id has to be looked up: what
        time it was sent with may be another one the next time.
        """
        if not self.archived:
            return False
        time_us = uuid7_time_us(event_id)
        return time_us is None or _rounded_up_s(time_us) <= self.id_time_s


def _rounded_up_s(time_us: int) -> int:
    """Rounding and clipping are monotone, so comparing can only err towards looking up."""
    return min(-(-time_us // 1_000_000), LAST_TIME_S)


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
            for time_us in (event.timestamp_us, event.id_time_us or 0):
                time_us.to_bytes(8, "little", signed=True)
            return cls(event, event_hash(event.event_id), _compact_json((tenant, *event_fields(event))))
        except (ValueError, TypeError, OverflowError) as exc:
            raise StorageError(f"an event cannot be stored: {exc!r}") from exc

    @property
    def member(self) -> bytes:
        """Of the index."""
        return self.id_hash.to_bytes(8, "little")


def member_of(event_id: str) -> bytes:
    """Of the index."""
    return event_hash(event_id).to_bytes(8, "little")


@dataclass(frozen=True, slots=True)
class Change:
    """What is committed for one user: new entries, and the states that they are folded into, by their keys."""

    user: User
    head: bytes  # through which the states held the log before; empty without a log
    entries: Sequence[Entry]
    states: Mapping[str, bytes]


def commit_arguments(changes: Mapping[str, Sequence[Change]], ttl_s: int) -> tuple[list[str], list[Argument]]:
    """KEYS and ARGV of COMMIT for changes by partition, PREFIX:{p17}; without any there, a write that changes nothing.

    The answers are in the order of the changes.
    """
    keys: list[str] = []
    args: list[Argument] = [ttl_s]
    for partition, of_users in changes.items():
        keys += (f"{partition}:seq", f"{partition}:log")
        args.append(len(of_users))
        for change in of_users:
            keys += (change.user.head, change.user.index, *change.states)
            args += (change.head, len(change.states), len(change.entries), *change.states.values())
            for entry in change.entries:
                args += (entry.member, entry.encoded)
    return keys, args


def keep_arguments(
    user: User, generation: Generation, through_seq: int, value: bytes, ttl_s: int
) -> tuple[list[str], list[Argument]]:
    """KEYS and ARGV of KEEP."""
    return [user.head, user.index, user.state(generation)], [f"{through_seq:0{SEQ_DIGITS}}", value, ttl_s]


def erase_arguments(user: User, tags: Iterable[str]) -> tuple[list[str], list[Argument]]:
    """KEYS and ARGV of ERASE."""
    keys = [user.seq, user.log, f"{user.partition}:scratch", user.aliases, user.head, user.index]
    return [*keys, *map(user.state_of_tag, tags)], [_compact_json((user.tenant, digest(user.user_id).hex()))]


def append_arguments(
    user: User, head: bytes | None, seq: bytes | None, entries: Iterable[Entry]
) -> tuple[list[str], list[Argument]]:
    """KEYS and ARGV of APPEND."""
    new: list[Argument] = []
    for entry in entries:
        new += (entry.member, entry.encoded)
    return [user.seq, user.log, user.head, user.index], [head or b"", seq or b"0", *new]


def move_arguments(
    user: User, head: bytes | None, mark: str, entry: Entry | None = None, tags: Iterable[str] = ()
) -> tuple[list[str], list[Argument]]:
    """KEYS and ARGV of MOVE."""
    logged: list[Argument] = [] if entry is None else [entry.member, entry.encoded]
    keys = [user.seq, user.log, user.head, user.index, *map(user.state_of_tag, tags)]
    return keys, [head or b"", mark, *logged]


def erasure(value: bytes) -> tuple[str, bytes] | None:
    """Tenant and digest of the user that an "x" of the log says was erased; None where it only says that."""
    if not value:
        return None
    tenant, user = json.loads(value)
    return tenant, bytes.fromhex(user)


def trim_arguments(
    keys: Keyspace, partition: int, through: int, events: Iterable[tuple[str, Event]]
) -> tuple[list[str], list[Argument]]:
    """KEYS and ARGV of TRIM for the oldest entries of a partition's log: the last SEQ, tenants and events."""
    newest_s: dict[User, int] = {}
    for tenant, event in events:
        user = keys.user(tenant, event.user_id)
        newest_s[user] = max(newest_s.get(user, 0), _rounded_up_s(uuid7_time_us(event.event_id) or 0))
    times: list[Argument] = [f"{time_s:0{TIME_DIGITS}}" for time_s in newest_s.values()]
    return [keys.log(partition), *(key for user in newest_s for key in (user.head, user.index))], [
        through,
        through + 1,
        *times,
    ]


def log_entries(user: User, found: Iterable[bytes]) -> Iterator[LogEntry]:
    """The entries in an answer of READ_LOG."""
    fields = iter(found)
    for seq, encoded in zip(fields, fields, strict=True):
        if not encoded:
            raise StorageError(f"a user's log has lost its entry {int(seq)}")
        _tenant, *columns = json.loads(encoded)
        yield LogEntry(int(seq), Event(*columns))


def partition_page(found: Sequence[tuple[bytes, Mapping[bytes, bytes]]], *, is_complete: bool) -> LogPage:
    """An answer of XRANGE. A user who was erased has no entries before that in the same answer."""
    entries: list[tuple[str, LogEntry]] = []
    erased: list[tuple[str, bytes]] = []
    for entry_id, fields in found:
        if b"e" in fields:
            tenant, *columns = json.loads(fields[b"e"])
            entries.append((tenant, LogEntry(entry_seq(entry_id), Event(*columns))))
        elif (user := erasure(fields[b"x"])) is not None:
            erased.append(user)
    return LogPage(entries, is_complete, erased)


def entry_seq(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])
