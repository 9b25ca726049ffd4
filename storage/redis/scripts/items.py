"""The scripts of items and their statistics."""

from storage.items.trends import HALF_LIFE_S, MAX_LAG_HALF_LIVES, MAX_LEAD_HALF_LIVES, MAX_STEP_S
from storage.records import ITEM_TIMES
from storage.redis.scripts.script import Script

ITEM_ARGUMENTS = 8  # of PUT_ITEMS for an item
# The first arguments of ADD_VISITS and ADD_ORDER_COUNTS.
TREND_LIMITS = tuple(map(repr, (HALF_LIFE_S, MAX_STEP_S, MAX_LAG_HALF_LIVES, MAX_LEAD_HALF_LIVES)))

# Equivalent to `HeldProperties.holding` in storage/records.py: returns the declared types, and the rejected name with
# its type. In the JSON of values that scripts read and write, all are texts, because numbers would lose digits.
HOLD_TYPES = """
local function hold_types(key, wanted, most)
    local held, changed = cjson.decode(redis.call('GET', key) or '{"item":{},"user":{}}'), false
    for owner, types in pairs(cjson.decode(wanted)) do
        local count = 0
        for _ in pairs(held[owner]) do count = count + 1 end
        for name, given in pairs(types) do
            if given == cjson.null and held[owner][name] then
                held.keys, held.removals = held.keys or {item = {}, user = {}}, (held.removals or 0) + 1
                held[owner][name], held.keys[owner][name], count, changed = nil, nil, count - 1, true
            end
        end
        for name, given in pairs(types) do
            local known = held[owner][name]
            if given ~= cjson.null and not known then
                held[owner][name], count, changed = given, count + 1, true
                if held.removals then held.keys[owner][name] = name .. '#' .. held.removals end
            elseif given ~= cjson.null and known ~= given then
                return held, {name, known}
            end
            if count > tonumber(most) then return held, {name, ''} end
        end
    end
    if changed then redis.call('SET', key, cjson.encode(held)) end
    return held
end
"""

# Removes dead values: all except live keys, among those from before the last removal that the caller knows.
REMOVE_DEAD = """
local function remove_dead(properties, live, removals)
    for key in pairs(properties) do
        if not live[key] and tonumber(string.match(key, '#(%d+)$') or 0) < removals then properties[key] = nil end
    end
end
"""

DECLARE_TYPES = Script(
    HOLD_TYPES
    + """
-- KEYS  property-types
-- ARGV  types by owner, most properties of an owner
local held, refused = hold_types(KEYS[1], ARGV[1], ARGV[2])
return refused or cjson.encode(held)
"""
)

# A value to set begins with "="; an empty argument leaves the value unchanged. Properties are a JSON object with the
# JSON of each value as a text, or null. The caller may pass the properties that it has read, and what they become: if
# they are still stored, the script need not decode them. An empty vector removes the stored one. The reply is how many
# of the items were set: the script stops when it has merged more than the given bytes of properties. If a vector
# differs in size from the stored ones, the reply is an empty text and both sizes.
PUT_ITEMS = Script(
    HOLD_TYPES
    + REMOVE_DEAD
    + f"local item_arguments, live = {ITEM_ARGUMENTS}, {{{', '.join(f'{name} = true' for name in ITEM_TIMES)}}}\n"
    + """
-- KEYS  version, changes, title, categories, available, properties, property-types, vectors, vector-bytes
-- ARGV  types by owner, most properties, bytes to merge; of each item: id, title, categories, available, properties,
--       vector, the properties that were read, and what they become
local vector_bytes, has_vectors = tonumber(redis.call('GET', KEYS[9]) or '0'), false
local done, merged = 0, 0
for arg = 4, #ARGV, item_arguments do
    local given = #ARGV[arg + 5] - 1
    has_vectors = has_vectors or given >= 0
    if given > 0 then
        if vector_bytes == 0 then vector_bytes = given end
        if given ~= vector_bytes then return {'', tostring(given), tostring(vector_bytes)} end
    end
end
local held, refused = hold_types(KEYS[7], ARGV[1], ARGV[2])
if refused then return refused end
local key_of = held.keys and held.keys.item or {}
for name in pairs(held.item) do live[key_of[name] or name] = true end
local function put_properties(item, patch, read, becomes)
    if patch == '{}' then return end
    local stored = redis.call('HGET', KEYS[6], item) or '{}'
    if stored == read and not held.removals then
        if becomes == '{}' then redis.call('HDEL', KEYS[6], item) else redis.call('HSET', KEYS[6], item, becomes) end
        return
    end
    merged = merged + #stored + #patch
    local properties = cjson.decode(stored)
    for name, value in pairs(cjson.decode(patch)) do
        if value == cjson.null then value = nil end
        properties[key_of[name] or name] = value
    end
    remove_dead(properties, live, held.removals or 0)
    if next(properties) then
        redis.call('HSET', KEYS[6], item, cjson.encode(properties))
    else
        redis.call('HDEL', KEYS[6], item)
    end
end
local function put_vector(item, vector)
    if vector == '=' then
        redis.call('HDEL', KEYS[8], item)
    elseif vector ~= '' then
        redis.call('HSET', KEYS[8], item, string.sub(vector, 2))
    end
end
for arg = 4, #ARGV, item_arguments do
    if merged > tonumber(ARGV[3]) then break end
    redis.call('ZADD', KEYS[2], redis.call('INCR', KEYS[1]), ARGV[arg])
    for part = 1, 3 do
        local value = ARGV[arg + part]
        if value ~= '' then redis.call('HSET', KEYS[part + 2], ARGV[arg], string.sub(value, 2)) end
    end
    put_properties(ARGV[arg], ARGV[arg + 4], ARGV[arg + 6], ARGV[arg + 7])
    put_vector(ARGV[arg], ARGV[arg + 5])
    done = done + 1
end
if has_vectors then
    if redis.call('HLEN', KEYS[8]) > 0 then
        redis.call('SET', KEYS[9], vector_bytes)
    else
        redis.call('DEL', KEYS[9])
    end
end
return done
"""
)

# Returns stored properties of the first of these items, until they exceed the given bytes; none if a property was ever
# removed, since then only PUT_ITEMS can merge them.
READ_ITEM_PROPERTIES = Script("""
-- KEYS  properties, property-types
-- ARGV  bytes, item ids
if cjson.decode(redis.call('GET', KEYS[2]) or '{}').removals then return {} end
local found, size = {}, 0
for arg = 2, #ARGV do
    local stored = redis.call('HGET', KEYS[1], ARGV[arg]) or '{}'
    size = size + #stored
    if size > tonumber(ARGV[1]) then break end
    found[#found + 1] = stored
end
return found
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

# Returns the declared properties, then a list for items and one for codes, up to the limit each: versions, members,
# and a list of values for each part. Items end once their properties exceed the given bytes, and codes then end at the
# version of the last item.
READ_ITEMS = Script("""
-- KEYS  changes, code-changes, codes, title, categories, available, properties, property-types
-- ARGV  after, limit, bytes of properties
local last, size = '+inf', 0
local function changed(key, parts)
    local found = redis.call('ZRANGEBYSCORE', key, '(' .. ARGV[1], last, 'WITHSCORES', 'LIMIT', 0, ARGV[2])
    local members, versions = {}, {}
    for i = 1, #found, 2 do
        members[#members + 1], versions[#versions + 1] = found[i], found[i + 1]
        if key == KEYS[1] then size = size + redis.call('HSTRLEN', KEYS[7], found[i]) end
        if key == KEYS[1] and size > tonumber(ARGV[3]) then
            last = found[i + 1]
            break
        end
    end
    local answer = {versions, members}
    for _, part in ipairs(parts) do
        answer[#answer + 1] = #members > 0 and redis.call('HMGET', part, unpack(members)) or {}
    end
    return answer
end
return {redis.call('GET', KEYS[8]), changed(KEYS[1], {KEYS[4], KEYS[5], KEYS[6], KEYS[7]}), changed(KEYS[2], {KEYS[3]})}
""")

# Equivalent to `TrendClock`, `with_visitor` and `sum_of_trends` in storage/items/trends.py.
ADD_VISITS = Script("""
-- KEYS  trends, trend-clock, visitors
-- ARGV  seconds of a half-life and of the longest step; half-lives by which trends may be behind and ahead; bytes of a
--       full list of visitors; of each visit: item id, visitor, weight
local half_life_s, now_s = tonumber(ARGV[1]), tonumber(redis.call('TIME')[1])
local position, read_s = string.match(redis.call('GET', KEYS[2]) or '', '(%S+) (%S+)')
local before = tonumber(position or now_s / half_life_s)
position = before + math.min(math.max(now_s - (read_s or now_s), 0), ARGV[2]) / half_life_s
redis.call('SET', KEYS[2], string.format('%.17g %d', position, now_s))
if math.floor(position) > math.floor(before) then redis.call('UNLINK', KEYS[3]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. position - ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. position + ARGV[4], '+inf')

local function sketch_with_visitor(sketch, visitor)
    local register, b, c, d = string.byte(visitor, 1, 4)
    local _, bits = math.frexp(b * 65536 + c * 256 + d)
    local rank, highest = 25 - bits, string.byte(sketch, register + 1)
    if rank <= highest then return sketch, 0 end
    local unseen = struct.unpack('>d', sketch, 257)
    sketch = string.sub(sketch, 1, register) .. string.char(rank) .. string.sub(sketch, register + 2, 256)
    return sketch .. struct.pack('>d', unseen - 2 ^ -highest + 2 ^ -rank), 256 / unseen
end
local function with_visitor(seen, visitor)
    if #seen > tonumber(ARGV[5]) then return sketch_with_visitor(seen, visitor) end
    for at = 1, #seen, 4 do
        if string.sub(seen, at, at + 3) == visitor then return seen, 0 end
    end
    if #seen < tonumber(ARGV[5]) then return seen .. visitor, 1 end
    local sketch = string.rep('\\0', 256) .. struct.pack('>d', 256)
    for at = 1, #seen, 4 do sketch = sketch_with_visitor(sketch, string.sub(seen, at, at + 3)) end
    return sketch_with_visitor(sketch, visitor)
end

local items, seen, sums, changed = {}, {}, {}, {}
for arg = 6, #ARGV, 3 do items[#items + 1] = ARGV[arg] end
local visitors, trends = redis.call('HMGET', KEYS[3], unpack(items)), redis.call('ZMSCORE', KEYS[1], unpack(items))
for i, item in ipairs(items) do seen[item], sums[item] = visitors[i] or '', tonumber(trends[i]) end
for i, item in ipairs(items) do
    local visitor, weight = ARGV[3 * i + 4], ARGV[3 * i + 5]
    local of_item, count = with_visitor(seen[item], visitor)
    if count > 0 then
        local trend, sum = position + math.log(weight * count) / math.log(2), sums[item]
        if sum then
            local high, low = math.max(sum, trend), math.min(sum, trend)
            trend = high + math.log(1 + 2 ^ (low - high)) / math.log(2)
        end
        seen[item], sums[item], changed[item] = of_item, trend, true
    end
end
local of_visitors, of_trends = {}, {}
for item in pairs(changed) do
    of_visitors[#of_visitors + 1], of_visitors[#of_visitors + 2] = item, seen[item]
    of_trends[#of_trends + 1], of_trends[#of_trends + 2] = string.format('%.17g', sums[item]), item
end
if #of_trends > 0 then
    redis.call('HSET', KEYS[3], unpack(of_visitors))
    redis.call('ZADD', KEYS[1], unpack(of_trends))
end
return 1
""")

# Equivalent to `TrendClock` and `sum_of_trends` in storage/items/trends.py.
ADD_ORDER_COUNTS = Script("""
-- KEYS  order-counts, order-clock
-- ARGV  seconds of a half-life and of the longest step; half-lives by which counts may be behind and ahead; how many
--       are kept; of each: name, how many
local half_life_s, now_s = tonumber(ARGV[1]), tonumber(redis.call('TIME')[1])
local position, read_s = string.match(redis.call('GET', KEYS[2]) or '', '(%S+) (%S+)')
position = tonumber(position or now_s / half_life_s)
position = position + math.min(math.max(now_s - (read_s or now_s), 0), ARGV[2]) / half_life_s
redis.call('SET', KEYS[2], string.format('%.17g %d', position, now_s))
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. position - ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '(' .. position + ARGV[4], '+inf')
for arg = 6, #ARGV, 2 do
    local trend = position + math.log(ARGV[arg + 1]) / math.log(2)
    local sum = redis.call('ZSCORE', KEYS[1], ARGV[arg])
    if sum then
        local high, low = math.max(sum, trend), math.min(sum, trend)
        trend = high + math.log(1 + 2 ^ (low - high)) / math.log(2)
    end
    redis.call('ZADD', KEYS[1], string.format('%.17g', trend), ARGV[arg])
end
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - ARGV[5])
return 1
""")

ADD_TALLIES = Script("""
-- KEYS  tallies
-- ARGV  of each: name, how many or how much
for arg = 1, #ARGV, 2 do redis.call('HINCRBYFLOAT', KEYS[1], ARGV[arg], ARGV[arg + 1]) end
return 1
""")
