"""The Lua scripts that run in Redis, and the keys and arguments that they take.

Every script touches the keys of one slot only, except COMMIT on a single server.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha1

from storage.redis.layout import SEQ_DIGITS, Change, Entry, User
from storage.redis.nodes import Argument, Command
from storage.state.generation import Generation


class Script:
    """A Lua script, which is called by its hash."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = sha1(text.encode(), usedforsecurity=False).hexdigest()

    def command(self, keys: Sequence[str], args: Sequence[Argument]) -> Command:
        """Return the command that calls the script."""
        return Command(keys[0], ("EVALSHA", self.sha, len(keys), *keys, *args))


ADD_TALLIES = Script("""
-- KEYS  tallies
-- ARGV  of each: name, how many
for arg = 1, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[arg], ARGV[arg + 1]) end
return 1
""")

# Applies each user's change and replies with the id of its last entry. Applies nothing and replies 0 where the user's
# log is not what the caller believes, or an error. A call takes any number of partitions of a single server, in a
# cluster one. All of a partition is checked before its first write, and a server that is full or read-only refuses
# that write already.
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
    if user.head == '' and redis.call('EXISTS', KEYS[user.key + 1]) == 1 then
        user.lost_head = {err = 'a user has entries and no head'}
        return false
    end
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
        replies[number] = user.applies and string.format('%.0f', seq) .. id_end or user.lost_head or 0
    end
end

for _, partition in ipairs(partitions) do
    local is_done, why = pcall(apply, partition)  -- what is odd in one partition is nothing to the others
    if not is_done then
        for number = partition.first, partition.last do
            replies[number] = {err = type(why) == 'table' and why.err or tostring(why)}
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

# Stores the fold of a user's log through an entry that is still in it, unless one further on is stored already. An
# archived entry counts only as the newest: it might be of a user who was erased and came back.
SAVE_STATE = Script("""
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

# Returns pairs of SEQ and entry, in log order or newest first. Where the archive has to be read before that, in log
# order, returns only the SEQ through which to read it.
READ_LOG = Script("""
-- KEYS  head, index, log
-- ARGV  after, through, limit; where the newest come first, 'newest'
local found
if ARGV[4] == 'newest' then
    found = redis.call('ZREVRANGEBYSCORE', KEYS[2], ARGV[2], '(' .. ARGV[1], 'WITHSCORES', 'LIMIT', 0, ARGV[3])
else
    local archived = string.sub(redis.call('GET', KEYS[1]) or '', 17, 32)
    if archived ~= '' and tonumber(ARGV[1]) < tonumber(archived) then return {archived} end
    found = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. ARGV[1], ARGV[2], 'WITHSCORES', 'LIMIT', 0, ARGV[3])
end
for i = 1, #found, 2 do
    local seq = found[i + 1]
    local entry = redis.call('XRANGE', KEYS[3], seq, seq)[1]
    found[i], found[i + 1] = seq, entry and entry[2][2] or ''
end
return found
""")

# Removes a partition's entries through one that is archived, as are all before it. Doing it again changes nothing. A
# user who was erased since the entries were read, and came back, has none of them, and nothing in the archive.
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

# A value that is set begins with "="; an empty argument leaves the value as it was.
PUT_ITEMS = Script("""
-- KEYS  version, changes, title, categories, available
-- ARGV  of each item: id, title, categories, available
for arg = 1, #ARGV, 4 do
    redis.call('ZADD', KEYS[2], redis.call('INCR', KEYS[1]), ARGV[arg])
    for part = 1, 3 do
        local value = ARGV[arg + part]
        if value ~= '' then redis.call('HSET', KEYS[part + 2], ARGV[arg], string.sub(value, 2)) end
    end
end
return 1
""")

PUT_ITEM_CODES = Script("""
-- KEYS  version, code-changes, codes
-- ARGV  of each: item and generation, codes
for arg = 1, #ARGV, 2 do
    redis.call('ZADD', KEYS[2], redis.call('INCR', KEYS[1]), ARGV[arg])
    redis.call('HSET', KEYS[3], ARGV[arg], ARGV[arg + 1])
end
return 1
""")

# Returns a list for items and one for codes, up to the limit each: versions, members, and a list of values for each
# part.
READ_ITEMS = Script("""
-- KEYS  changes, code-changes, codes, title, categories, available
-- ARGV  after, limit
local function changed(key, parts)
    local found = redis.call('ZRANGEBYSCORE', key, '(' .. ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[2])
    local members, versions = {}, {}
    for i = 1, #found, 2 do
        members[#members + 1], versions[#versions + 1] = found[i], found[i + 1]
    end
    local answer = {versions, members}
    for _, part in ipairs(parts) do
        answer[#answer + 1] = #members > 0 and redis.call('HMGET', part, unpack(members)) or {}
    end
    return answer
end
return {changed(KEYS[1], {KEYS[4], KEYS[5], KEYS[6]}), changed(KEYS[2], {KEYS[3]})}
""")

# Does as `TrendClock`, `visitors_with` and `sum_of_trends` in storage/trends.py do.
ADD_VISITS = Script("""
-- KEYS  trends, trend-clock, visitors
-- ARGV  seconds of a half-life and of the longest step; half-lives by which trends may be behind and ahead; bytes of an
--       item's visitors; of each visit: item id, visitor, weight
local half_life_s, now_s = tonumber(ARGV[1]), tonumber(redis.call('TIME')[1])
local position, read_s = string.match(redis.call('GET', KEYS[2]) or '', '(%S+) (%S+)')
local before = tonumber(position or now_s / half_life_s)
position = before + math.min(math.max(now_s - (read_s or now_s), 0), ARGV[2]) / half_life_s
redis.call('SET', KEYS[2], string.format('%.17g %d', position, now_s))
if math.floor(position) > math.floor(before) then redis.call('UNLINK', KEYS[3]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. position - ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. position + ARGV[4], '+inf')

local function is_recent(visitors, visitor)
    for at = 1, #visitors, #visitor do
        if string.sub(visitors, at, at + #visitor - 1) == visitor then return true end
    end
end
for arg = 6, #ARGV, 3 do
    local item, visitor, visitors = ARGV[arg], ARGV[arg + 1], redis.call('HGET', KEYS[3], ARGV[arg]) or ''
    if not is_recent(visitors, visitor) then
        redis.call('HSET', KEYS[3], item, string.sub(visitor .. visitors, 1, ARGV[5]))
        local trend, sum = position + math.log(ARGV[arg + 2]) / math.log(2), redis.call('ZSCORE', KEYS[1], item)
        if sum then
            local high, low = math.max(sum, trend), math.min(sum, trend)
            trend = high + math.log(1 + 2 ^ (low - high)) / math.log(2)
        end
        redis.call('ZADD', KEYS[1], string.format('%.17g', trend), item)
    end
end
return 1
""")

# TRIM is the archiver's.
LOG_SCRIPTS = (COMMIT, SAVE_STATE, READ_LOG, ERASE, APPEND, MARK_MERGE, REPAIR)
STORE_SCRIPTS = (*LOG_SCRIPTS, PUT_ITEMS, PUT_ITEM_CODES, READ_ITEMS, ADD_VISITS, ADD_TALLIES)


def commit_arguments(changes: Mapping[str, Sequence[Change]], ttl_s: int) -> tuple[list[str], list[Argument]]:
    """Return KEYS and ARGV of COMMIT for changes by partition, PREFIX:{p17}.

    The replies are in the order of the changes. A partition without changes gets a write that changes nothing.
    """
    keys: list[str] = []
    args: list[Argument] = [ttl_s]
    for partition, of_users in changes.items():
        keys += (f"{partition}:seq", f"{partition}:log")
        args.append(len(of_users))
        for change in of_users:
            keys += (change.head_key, change.id_index, *change.states)
            args += (change.head, len(change.states), len(change.entries), *change.states.values())
            for entry in change.entries:
                args += (entry.member, entry.encoded)
    return keys, args


def save_state_arguments(
    user: User, generation: Generation, through_seq: int, value: bytes, ttl_s: int
) -> tuple[list[str], list[Argument]]:
    """Return KEYS and ARGV of SAVE_STATE."""
    return [user.head, user.id_index, user.state(generation)], [f"{through_seq:0{SEQ_DIGITS}}", value, ttl_s]


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
