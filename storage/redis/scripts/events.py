"""The scripts that append, read and trim events, and keep their states."""

from collections.abc import Mapping, Sequence

from storage.redis.connections.nodes import Argument
from storage.redis.layout.head import SEQ_DIGITS
from storage.redis.layout.keys import User, log_key, seq_key
from storage.redis.layout.stream_entries import Change
from storage.redis.scripts.script import Script
from storage.state.generation import Generation

# Applies each user's change and replies with the id of its last entry. If the user's log is not as the caller expects,
# it applies nothing and replies with those of the id hashes that are logged, or an error. A call may cover any number
# of partitions on a single server, but one in a cluster. A partition is checked completely before its first write,
# which a full or read-only server already rejects.
COMMIT = Script("""
-- KEYS  for each partition: seq, log; for each of its users: head, index, states
-- ARGV  seconds until a state expires, 0 = never; for each partition: number of users; for each of them: believed head,
--       number of states and of new entries, states (16 bytes, in whose place the SEQ comes, and the encoded state),
--       id hash and entry of each
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

-- nil if the change of this user can be applied
local function refusal(number)
    local user, logged = users[number], {}
    local is_as_believed = heads[number] == user.head
    if is_as_believed then
        local is_in_redis = string.sub(user.head, 1, 16) > string.sub(user.head, 17, 32)
        if is_in_redis ~= (redis.call('EXISTS', KEYS[user.key + 1]) == 1) then
            return {err = is_in_redis and 'a user has no index of entries' or 'a user has entries and no head'}
        end
    end
    for new = user.first_new, user.first_new + 2 * user.new - 2, 2 do
        if redis.call('ZSCORE', KEYS[user.key + 1], ARGV[new]) then logged[#logged + 1] = ARGV[new] end
    end
    if not is_as_believed or #logged > 0 then return logged end
end

local replies, values, kept, seqs = {}, {}, {}, {}
local function apply(partition)
    local total = 0
    for number = partition.first, partition.last do
        users[number].refusal = refusal(number)
        if not users[number].refusal then total = total + users[number].new end
    end
    local seq = redis.call('INCRBY', KEYS[partition.key], total) - total
    for number = partition.first, partition.last do
        local user = users[number]
        if not user.refusal then
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
                values[#values + 1], values[#values + 2] = state, ARGV[user.first_state + i]
                kept[#kept + 1], seqs[#seqs + 1] = state, string.sub(head, 1, 16)
            end
        end
        replies[number] = user.refusal or string.format('%.0f', seq) .. id_end
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
-- Redis hashes every byte of a string that a script makes, so none is made of a state.
for i, state in ipairs(kept) do redis.call('SETRANGE', state, 0, seqs[i]) end
if ttl_s > 0 then
    for _, state in ipairs(kept) do redis.call('EXPIRE', state, ttl_s) end
end
return replies
""")

# Stores the fold of a user's log through an entry that is still in it, unless a later one is stored already. An
# archived entry must be the newest, because otherwise it may be of a user who was erased and has returned.
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

# Returns pairs of SEQ and entry, in log order or newest first. If the archive must be read first, in log order, it
# returns only the SEQ through which to read it; newest first, if there are no more entries, it adds that SEQ.
READ_LOG = Script("""
-- KEYS  head, index, log
-- ARGV  after, through, limit; where the newest come first, 'newest'
local found, head = nil, redis.call('GET', KEYS[1]) or ''
local archived = string.sub(head, 17, 32)
if string.sub(head, 1, 16) > archived and redis.call('EXISTS', KEYS[2]) == 0 then
    return redis.error_reply('a user has no index of entries')
end
if ARGV[4] == 'newest' then
    found = redis.call('ZREVRANGEBYSCORE', KEYS[2], ARGV[2], '(' .. ARGV[1], 'WITHSCORES', 'LIMIT', 0, ARGV[3])
else
    if archived ~= '' and tonumber(ARGV[1]) < tonumber(archived) then return {archived} end
    found = redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. ARGV[1], ARGV[2], 'WITHSCORES', 'LIMIT', 0, ARGV[3])
end
for i = 1, #found, 2 do
    local seq = found[i + 1]
    local entry = redis.call('XRANGE', KEYS[3], seq, seq)[1]
    found[i], found[i + 1] = seq, entry and entry[2][2] or ''
end
if ARGV[4] == 'newest' and #found < 2 * tonumber(ARGV[3]) then found[#found + 1] = archived end
return found
""")

# Removes a partition's entries through one that is archived, like all before it. It is idempotent. A user who was
# erased since the entries were read, and has returned, has none of them, and nothing in the archive.
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

NO_SEQ = b"0" * SEQ_DIGITS


def commit_arguments(changes: Mapping[str, Sequence[Change]], ttl_s: int) -> tuple[list[str], list[Argument]]:
    """Return KEYS and ARGV of COMMIT for changes by partition, PREFIX:{p17}.

    The replies are in the order of the changes. A partition without changes gets a write that changes nothing.
    """
    keys: list[str] = []
    args: list[Argument] = [ttl_s]
    for partition, of_users in changes.items():
        keys += (seq_key(partition), log_key(partition))
        args.append(len(of_users))
        for change in of_users:
            keys += (change.head_key, change.id_index, *change.states)
            args += (change.head, len(change.states), len(change.entries))
            args += (NO_SEQ + state for state in change.states.values())
            for entry in change.entries:
                args += (entry.member, entry.encoded)
    return keys, args


def save_state_arguments(
    user: User, generation: Generation, through_seq: int, value: bytes, ttl_s: int
) -> tuple[list[str], list[Argument]]:
    """Return KEYS and ARGV of SAVE_STATE."""
    return [user.head, user.id_index, user.state(generation)], [f"{through_seq:0{SEQ_DIGITS}}", value, ttl_s]
