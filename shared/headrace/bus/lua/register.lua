-- ARGV: site, ttl (ms), then field, value, ... The registration is replaced whole, and ends the reason that there was none.
local key = site_key(ARGV[1])
redis.call('DEL', key)
for i = 3, #ARGV, 2 do redis.call('HSET', key, ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', key, ARGV[2])
redis.call('DEL', site_part(ARGV[1], 'unregistered'))
redis.call('SADD', 'hr:sites', ARGV[1])
return 1
