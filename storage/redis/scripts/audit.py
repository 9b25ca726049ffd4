"""The script of audit logs."""

from storage.redis.scripts.script import Script

APPEND_AUDIT = Script("""
-- KEYS  audit, keys-seen
-- ARGV  1 if keys are noted, the keys as believed, the keys as they are; entries
if ARGV[1] == '1' then
    if (redis.call('GET', KEYS[2]) or '') ~= ARGV[2] then return 0 end
    redis.call('SET', KEYS[2], ARGV[3])
end
for arg = 4, #ARGV do redis.call('RPUSH', KEYS[1], ARGV[arg]) end
return 1
""")
