"""The scripts that change which events count, and for whom."""

from collections.abc import Iterable

from storage.redis.layout import Entry, User
from storage.redis.nodes import Argument
from storage.redis.scripts.script import Script

# Erases a user, and logs the erasure. Entries that XDEL removes stay in the stream's memory and dumps, so the script
# rewrites the partition's log; the numbers of the user's entries stay, since the archiver relies on them. Where nothing
# is to erase, an entry of nobody is logged all the same: an APPEND that began before is refused.
ERASE = Script("""
-- KEYS  seq, log, scratch, aliases, head, index; states
-- ARGV  what to log
local time = redis.call('TIME')
local seq = redis.call('INCRBY', KEYS[1], 1)
local id = string.format('%.0f-%s%03d', seq, time[1], math.floor(time[2] / 1000))
local is_there = redis.call('EXISTS', unpack(KEYS, 4)) > 0
redis.call('XADD', KEYS[2], id, 'x', is_there and ARGV[1] or '')
if not is_there then return id end
local gone = {}
for _, seq in ipairs(redis.call('ZRANGE', KEYS[6], 0, -1, 'WITHSCORES')) do gone[seq] = true end
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
return id
""")

# Appends entries whose ids a user's log lacks, without folding them, if the log is as the caller believes. A user
# without a log has no head, before or after being erased: then the partition's log has to be as believed.
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

# Changes the merge mark of a head that is as the caller believes. An entry, if given, is logged as the user's last one,
# and the states are deleted: nobody reads them again. Without entries and without a mark there is no head.
MARK_MERGE = Script("""
-- KEYS  seq, log, head, index; states
-- ARGV  believed head, mark and user or nothing; where there is an entry, id hash and entry
local head = redis.call('GET', KEYS[3]) or ''
if head ~= ARGV[1] then return 0 end
head = string.sub(head .. string.rep('0', 42 - #head), 1, 42)
local id = 1
if ARGV[3] then
    local time = redis.call('TIME')
    local seq = redis.call('INCRBY', KEYS[1], 1)
    id = string.format('%.0f-%s%03d', seq, time[1], math.floor(time[2] / 1000))
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
return id
""")

# Sets a head that is missing or damaged and makes the index again, if the partition's log is as the caller has read it.
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
    keys = [user.seq, user.log, user.head, user.id_index, *map(user.state_of_tag, tags)]
    return keys, [head or b"", mark, *logged]
