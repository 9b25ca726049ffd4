"""The scripts that change which events count, and for which user."""

import secrets
from collections.abc import Iterable, Sequence

from storage.redis.connections.nodes import Argument
from storage.redis.layout.head import MERGE_MARK
from storage.redis.layout.keys import User, erased_index_key, erasing_key, log_key, scratch_key
from storage.redis.layout.stream_entries import Entry, compact_json
from storage.redis.scripts.script import Script
from storage.state.event import digest

REWRITTEN_AT_ONCE = 250  # entries, which block Redis for about 2 ms

# Erases a user with the aliases that the caller knows, and logs the erasure. Does nothing if there is another alias, or
# the user was merged into somebody else than the caller knows: only the user leads to them. The log of the partition
# still has the content of the user's entries. The index of these entries is set aside until REWRITE_LOG has removed
# the content. If there is nothing to erase, an empty entry is logged nevertheless: an APPEND whose caller has already
# read the log is rejected, and a number without an entry would count as a loss.
ERASE = Script(f"""
-- KEYS  seq, log, erasing, erased index, properties, aliases, head, index; states
-- ARGV  what to log, name of the erasure, 1 where only the archive has anything of the user, user, the one that this
--       user may have been merged into; known aliases
local target = string.sub(redis.call('GET', KEYS[7]) or '', {MERGE_MARK + 2})
if target ~= '' and target ~= ARGV[5] then return 0 end
local is_known = {{}}
for arg = 6, #ARGV do is_known[ARGV[arg]] = true end
for _, alias in ipairs(redis.call('SMEMBERS', KEYS[6])) do
    if not is_known[alias] then return 0 end
end
local time = redis.call('TIME')
local seq = redis.call('INCRBY', KEYS[1], 1)
local id = string.format('%.0f-%s%03d', seq, time[1], math.floor(time[2] / 1000))
local is_there = redis.call('HDEL', KEYS[5], ARGV[4]) + redis.call('EXISTS', unpack(KEYS, 6)) > 0 or ARGV[3] == '1'
redis.call('XADD', KEYS[2], id, 'x', is_there and ARGV[1] or '')
if not is_there then return id end
redis.call('ZADD', KEYS[3], 0, ARGV[2])
if redis.call('EXISTS', KEYS[8]) == 1 then redis.call('RENAME', KEYS[8], KEYS[4]) end
redis.call('UNLINK', unpack(KEYS, 6))
return id
""")

# Copies one more page of a partition's log without the content of erased entries. After the last page the copy replaces
# the log, because entries removed by XDEL would stay in the stream's memory and dumps. Entries keep their numbers,
# which the archiver relies on. An erasure during a copy requires another copy. Does nothing if there are other
# erasures than the caller expects.
REWRITE_LOG = Script("""
-- KEYS  log, scratch, erasing; erased index of each erasure
-- ARGV  entries of a page; erasures
if table.concat(redis.call('ZRANGE', KEYS[3], 0, -1), ' ') ~= table.concat(ARGV, ' ', 2) then return 0 end
local function edge(command, key, from, to)
    local entry = redis.call(command, key, from, to, 'COUNT', 1)[1]
    return entry and entry[1]
end
local after = edge('XREVRANGE', KEYS[2], '+', '-')
if not after then
    for arg = 2, #ARGV do redis.call('ZADD', KEYS[3], 1, ARGV[arg]) end
end
local page = redis.call('XRANGE', KEYS[1], after and '(' .. after or '-', '+', 'COUNT', ARGV[1])
local is_erased = {}
for key = 4, page[1] and #KEYS or 0 do
    local first, last = string.match(page[1][1], '^%d+'), string.match(page[#page][1], '^%d+')
    local found = redis.call('ZRANGEBYSCORE', KEYS[key], first, last, 'WITHSCORES')
    for i = 2, #found, 2 do is_erased[found[i]] = true end
end
for _, entry in ipairs(page) do
    local field, value = entry[2][1], entry[2][2]
    if is_erased[string.match(entry[1], '^%d+')] then field, value = 'x', '' end
    redis.call('XADD', KEYS[2], entry[1], field, value)
end
if #page == tonumber(ARGV[1]) then return 1 end

local first = edge('XRANGE', KEYS[1], '-', '+')
if first and edge('XREVRANGE', KEYS[1], '+', '-') ~= edge('XREVRANGE', KEYS[2], '+', '-') then
    redis.call('UNLINK', KEYS[2])  -- somebody has put another log in the place of the one that was copied
    return 0
end
if first then
    redis.call('XTRIM', KEYS[2], 'MINID', '=', first)  -- what was trimmed in the meantime
    redis.call('UNLINK', KEYS[1])
    redis.call('RENAME', KEYS[2], KEYS[1])
end
for arg = 2, #ARGV do
    if redis.call('ZSCORE', KEYS[3], ARGV[arg]) == '1' then
        redis.call('ZREM', KEYS[3], ARGV[arg])
        redis.call('UNLINK', KEYS[arg + 2])
    end
end
return 1
""")

# Appends entries whose ids a user's log lacks, without folding them, if the log is as the caller expects. A user
# without a log has no head, before and after an erasure: then the partition's log must be as expected.
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
return string.format('%.0f', seq) .. id_end
""")

# Changes the merge mark of a head that is as the caller expects. If an entry is given, it becomes the user's last one,
# and the states are deleted, because they are not read again; after the merge the properties are deleted too. Without
# entries and without a mark there is no head.
MARK_MERGE = Script("""
-- KEYS  seq, log, head, index, properties; states
-- ARGV  believed head, mark and user or nothing, user of the head; where there is an entry, id hash and entry
local head = redis.call('GET', KEYS[3]) or ''
if head ~= ARGV[1] then return 0 end
head = string.sub(head .. string.rep('0', 42 - #head), 1, 42)
local id = 1
if string.sub(ARGV[2], 1, 1) == '=' then redis.call('HDEL', KEYS[5], ARGV[3]) end
if ARGV[4] then
    local time = redis.call('TIME')
    local seq = redis.call('INCRBY', KEYS[1], 1)
    id = string.format('%.0f-%s%03d', seq, time[1], math.floor(time[2] / 1000))
    redis.call('XADD', KEYS[2], id, 'e', ARGV[5])
    redis.call('ZADD', KEYS[4], seq, ARGV[4])
    head = string.format('%016.0f', seq) .. string.sub(head, 17)
    for key = 6, #KEYS do redis.call('DEL', KEYS[key]) end
end
if ARGV[2] == '' and tonumber(string.sub(head, 1, 16)) == 0 then
    redis.call('DEL', KEYS[3])
else
    redis.call('SET', KEYS[3], head .. ARGV[2])
end
return id
""")

# Adds an alias to a user's, if the user's log is as the caller has read it; without a head, as in APPEND.
NOTE_ALIAS = Script("""
-- KEYS  seq, head, aliases
-- ARGV  believed head and SEQ of the partition's newest entry; the alias
local head = redis.call('GET', KEYS[2]) or ''
if head ~= ARGV[1] or (head == '' and (redis.call('GET', KEYS[1]) or '0') ~= ARGV[2]) then return 0 end
redis.call('SADD', KEYS[3], ARGV[3])
return 1
""")

# Continues a partition's numbers after another one, and moves entries with later numbers to a key of their own, if the
# log is as the caller has read it.
SET_ASIDE = Script("""
-- KEYS  seq, log, aside
-- ARGV  ids of the log's last entry and of the first one to set aside, or nothing; the number
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if (last and last[1] or '') ~= ARGV[1] then return 0 end
if ARGV[2] ~= '' then
    redis.call('XTRIM', KEYS[2], 'MINID', ARGV[2])
    redis.call('RENAME', KEYS[2], KEYS[3])
end
redis.call('SET', KEYS[1], ARGV[3])
return 1
""")

# Sets a missing or damaged head and rebuilds the index, if the partition's log is as the caller has read it.
REPAIR = Script("""
-- KEYS  seq, log, head, index; states
-- ARGV  what was read of head and seq, the id of the log's first entry, the right head; SEQ and id hash of each entry
local first = redis.call('XRANGE', KEYS[2], '-', '+', 'COUNT', 1)[1]
local read = redis.call('MGET', KEYS[3], KEYS[1])  -- false for a head of another type
if (read[1] or '') ~= ARGV[1] or read[2] ~= ARGV[2] or (first and first[1] or '') ~= ARGV[3] then return 0 end
for key = 3, #KEYS do redis.call('DEL', KEYS[key]) end
redis.call('SET', KEYS[3], ARGV[4])
for arg = 5, #ARGV, 2 do redis.call('ZADD', KEYS[4], ARGV[arg], ARGV[arg + 1]) end
return 1
""")


def erase_arguments(
    user: User, target: str, aliases: Iterable[User], *, tags: Iterable[str], is_lost: bool
) -> tuple[list[str], list[Argument]]:
    """Return KEYS and ARGV of ERASE."""
    erasure, logged = secrets.token_hex(8), compact_json((user.tenant, digest(user.user_id).hex()))
    keys = [user.seq, user.log, erasing_key(user.partition), erased_index_key(user.partition, erasure)]
    keys += [user.properties, user.aliases, user.head, user.id_index, *map(user.state_of_tag, tags)]
    return keys, [logged, erasure, int(is_lost), user.name, target, *(alias.user_id for alias in aliases)]


def rewrite_arguments(partition: str, erasures: Sequence[bytes]) -> tuple[list[str], list[Argument]]:
    """Return KEYS and ARGV of REWRITE_LOG for the unfinished erasures in a partition, PREFIX:{p17}."""
    indexes = [erased_index_key(partition, erasure.decode()) for erasure in erasures]
    return [log_key(partition), scratch_key(partition), erasing_key(partition), *indexes], [
        REWRITTEN_AT_ONCE,
        *erasures,
    ]


def append_arguments(
    user: User, head: bytes | None, seq: bytes | None, entries: Iterable[Entry]
) -> tuple[list[str], list[Argument]]:
    """Return KEYS and ARGV of APPEND."""
    new: list[Argument] = []
    for entry in entries:
        new += (entry.member, entry.encoded)
    return [user.seq, user.log, user.head, user.id_index], [head or b"", seq or b"0", *new]


def mark_merge_arguments(
    user: User, head: bytes | None, mark: str, entry: Entry | None = None, tags: Iterable[str] = ()
) -> tuple[list[str], list[Argument]]:
    """Return KEYS and ARGV of MARK_MERGE."""
    logged: list[Argument] = [] if entry is None else [entry.member, entry.encoded]
    keys = [user.seq, user.log, user.head, user.id_index, user.properties, *map(user.state_of_tag, tags)]
    return keys, [head or b"", mark, user.name, *logged]
