"""The script of scenarios."""

from storage.redis.scripts.script import Script

ADD_SCENARIO_VERSION = Script("""
-- KEYS  scenarios-revision, scenarios, the scenario's versions; those of another one that is dropped
-- ARGV  believed revision, new revision, most versions, name, version; name of the other one
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('HSET', KEYS[2], ARGV[4], ARGV[5])
redis.call('RPUSH', KEYS[3], ARGV[5])
redis.call('LTRIM', KEYS[3], -ARGV[3], -1)
if KEYS[4] then
    redis.call('HDEL', KEYS[2], ARGV[6])
    redis.call('UNLINK', KEYS[4])
end
return 1
""")
