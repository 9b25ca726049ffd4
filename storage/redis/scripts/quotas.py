"""The script that counts against quotas in sliding windows."""

from storage.redis.scripts.script import Script

SPEND = Script("""
-- KEYS  counters in one slot: number of a window -> what was spent in it
-- ARGV  length of a window in ms, cost, and the limit of each counter
-- Spends the cost from all counters and returns 0. If one lacks it, nothing is spent; the reply is the place of the
-- first that does, what was spent in its previous and its current window, and the rest of the current one in ms.
local length, cost = tonumber(ARGV[1]), tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local window, rest = math.floor(now / length), length - now % length
local previous_of, current_of = {}, {}
for place, key in ipairs(KEYS) do
    local counts = redis.call('HMGET', key, window - 1, window)
    local previous, current = tonumber(counts[1]) or 0, tonumber(counts[2]) or 0
    if math.ceil(previous * rest / length) + current + cost > tonumber(ARGV[2 + place]) then
        return {place, previous, current, rest}
    end
    previous_of[place], current_of[place] = previous, current
end
for place, key in ipairs(KEYS) do
    redis.call('DEL', key) -- also what was counted while the clock was ahead, which that time would count again
    redis.call('HSET', key, window - 1, previous_of[place], window, current_of[place] + cost)
    redis.call('PEXPIRE', key, 2 * length)
end
return 0
""")
