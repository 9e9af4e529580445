-- Keeps two notes of what is stored: rate_* is the older one. ARGV: run, least time between notes (ms).
local key = run_key(ARGV[1])
local newer, stored, tokens = unpack(redis.call('HMGET', key, 'next_since', 'stored', 'tokens'))
local time = now_ms()
if redis.call('EXISTS', key) == 0 or (newer and time - newer < tonumber(ARGV[2])) then return 0 end
if newer then
  local rows, held = unpack(redis.call('HMGET', key, 'next_rows', 'next_tokens'))
  redis.call('HSET', key, 'rate_since', newer, 'rate_rows', rows, 'rate_tokens', held)
else
  redis.call('HSET', key, 'rate_since', int(time), 'rate_rows', stored or 0, 'rate_tokens', tokens or 0)
end
redis.call('HSET', key, 'next_since', int(time), 'next_rows', stored or 0, 'next_tokens', tokens or 0)
return 1
