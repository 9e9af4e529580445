-- ARGV: site, ttl (ms), then field, value, ... The registration is replaced whole.
local key = site_key(ARGV[1])
redis.call('DEL', key)
for i = 3, #ARGV, 2 do redis.call('HSET', key, ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', key, ARGV[2])
redis.call('SADD', 'hr:sites', ARGV[1])
return 1
