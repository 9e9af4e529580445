-- Sets the in-flight lease of requests to now + lease. ARGV: run, lease ms, answered (0 or 1), then request ids.
-- Returns those that hold no lease any more.
local run, answered, lost = ARGV[1], ARGV[3] == '1', {}
local till = int(now_ms() + tonumber(ARGV[2]))
for i = 4, #ARGV do
  local request = ARGV[i]
  if redis.call('ZSCORE', part_key(run, 'inflight'), request) then
    local site, tokens, bytes = unpack(redis.call('HMGET', request_key(request), 'site', 'tokens', 'bytes'))
    redis.call('ZADD', part_key(run, 'inflight'), till, request)
    if site then
      hold_credit(site, request, tokens .. ' ' .. bytes .. ' ' .. till)
      redis.call('PEXPIRE', request_key(request), REQUEST_TTL_MS)
      if answered then redis.call('HSET', request_key(request), 'answered', 1) end
    end
  else
    lost[#lost + 1] = request
  end
end
return lost
