-- The watcher's renewal. ARGV: site, captured lease, storing lease (ms), n, then n requests whose dump is there, then
-- the requests that the storage queue still holds. Returns the first kind's requests that are captured no more.
local site, n, lost = ARGV[1], tonumber(ARGV[4]), {}
local time = now_ms()
local captured, storing = int(time + ARGV[2]), int(time + ARGV[3])
for i = 5, 4 + n do
  if redis.call('ZSCORE', site_part(site, 'captured'), ARGV[i]) then
    redis.call('ZADD', site_part(site, 'captured'), captured, ARGV[i])
    redis.call('PEXPIRE', request_key(ARGV[i]), REQUEST_TTL_MS)
  else
    lost[#lost + 1] = ARGV[i]
  end
end
for i = 5 + n, #ARGV do
  if redis.call('ZSCORE', site_part(site, 'storing'), ARGV[i]) then
    redis.call('ZADD', site_part(site, 'storing'), storing, ARGV[i])
  end
end
return lost
