"""The scripts of users' properties: JSON objects like those of items, in one hash per partition."""

from storage.redis.layout.head import MERGE_MARK
from storage.redis.layout.keys import User
from storage.redis.scripts.items import REMOVE_DEAD
from storage.redis.scripts.script import Script

# Changes nothing if the user was, or is being, merged into another one, or the log is not as the caller expects. A
# user without a log has no head, before and after an erasure: then the partition's log must be as expected.
PUT_USER_PROPERTIES = Script(
    REMOVE_DEAD
    + f"""
-- KEYS  seq, head, properties
-- ARGV  user, properties by key, 1 where they only fill what is missing; a JSON object whose names are the live keys,
--       and the number of removals, see `HeldProperties` in storage/records.py; believed head and SEQ of the newest
--       entry of the partition, or nothing where any will do
local head = redis.call('GET', KEYS[2]) or ''
if #head > {MERGE_MARK} or (ARGV[6] and head ~= ARGV[6]) then return 0 end
if ARGV[6] == '' and (redis.call('GET', KEYS[1]) or '0') ~= ARGV[7] then return 0 end
local properties = cjson.decode(redis.call('HGET', KEYS[3], ARGV[1]) or '{{}}')
for name, value in pairs(cjson.decode(ARGV[2])) do
    if value == cjson.null then
        properties[name] = nil
    elseif ARGV[3] == '0' or not properties[name] then
        properties[name] = value
    end
end
remove_dead(properties, cjson.decode(ARGV[4]), tonumber(ARGV[5]))
if next(properties) then
    redis.call('HSET', KEYS[3], ARGV[1], cjson.encode(properties))
else
    redis.call('HDEL', KEYS[3], ARGV[1])
end
return 1
"""
)

READ_USER_PROPERTIES = Script("""
-- KEYS  head, properties
-- ARGV  user
return {redis.call('GET', KEYS[1]), redis.call('HGET', KEYS[2], ARGV[1])}
""")


def put_properties_keys(user: User) -> list[str]:
    """Return KEYS of PUT_USER_PROPERTIES."""
    return [user.seq, user.head, user.properties]
