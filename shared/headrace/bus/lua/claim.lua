-- Opens attempts at one site, within its caps.
-- ARGV: run, site, boot, lease ms, then ordinal, request, tokens, bytes, sample, mask for each attempt.
-- Returns for each: claimed, taken (not pending, or an id that was used before), full, gone (site or boot), or the
-- run's state when it is not active.
local run, site, boot, lease = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local answers = {}
local function all(answer)
  for i = 5, #ARGV, 6 do answers[#answers + 1] = answer end
  return answers
end
local state = redis.call('HGET', run_key(run), 'state')
if state ~= 'active' then return all(state or 'gone') end
local fields = redis.call('HMGET', site_key(site), 'boot', 'max_requests', 'max_tokens', 'dump_cap_bytes', 'dump_bytes')
if not fields[1] or fields[1] ~= boot then return all('gone') end

local credits = redis.call('HGETALL', site_part(site, 'credits'))
local requests, tokens, bytes = #credits / 2, 0, tonumber(fields[5])
for i = 2, #credits, 2 do
  local held_tokens, held_bytes = string.match(credits[i], '^(%d+) (%d+) ')
  tokens, bytes = tokens + held_tokens, bytes + held_bytes
end

local till = int(now_ms() + lease)
for i = 5, #ARGV, 6 do
  local ordinal, request, need_tokens, need_bytes = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  local sample = load(run, ordinal)
  local answer = 'claimed'
  if sample and sample.state == 'in_flight' and sample.live == request then
    answer = 'claimed'  -- repeated after a time-out
  elseif not sample or sample.state ~= 'pending' or redis.call('EXISTS', request_key(request)) == 1 then
    answer = 'taken'
  elseif requests + 1 > tonumber(fields[2]) or tokens + need_tokens > tonumber(fields[3])
      or bytes + need_bytes > tonumber(fields[4]) then
    answer = 'full'
  else
    requests, tokens, bytes = requests + 1, tokens + need_tokens, bytes + need_bytes
    sample.state, sample.attempts, sample.live, sample.reason = 'in_flight', sample.attempts + 1, request, ''
    save(run, ordinal, sample)
    redis.call('LREM', part_key(run, 'pending'), 1, ordinal)
    redis.call('ZADD', part_key(run, 'inflight'), till, request)
    redis.call('HSET', request_key(request), 'run', run, 'ordinal', ordinal, 'site', site, 'tokens', ARGV[i + 2],
      'bytes', ARGV[i + 3], 'sample', ARGV[i + 4], 'mask', ARGV[i + 5], 'attempt', int(sample.attempts))
    if sample.attempts == 1 and not has_failed(run, ordinal) then redis.call('HSET', request_key(request), 'first', 1) end
    redis.call('PEXPIRE', request_key(request), REQUEST_TTL_MS)
    hold_credit(site, request, ARGV[i + 2] .. ' ' .. ARGV[i + 3] .. ' ' .. till)
  end
  answers[#answers + 1] = answer
end
return answers
