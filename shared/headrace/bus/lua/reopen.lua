-- Samples that are done by a failure are to be extracted again. ARGV: run, then ordinal and the failed line's reason for
-- each. Returns those of the ordinals that are open after a failure; the same again when repeated.
local run, reopened, new = ARGV[1], {}, false
local key = run_key(run)
local cursor, state = unpack(redis.call('HMGET', key, 'cursor', 'state'))
for i = 2, cursor and #ARGV or 0, 2 do
  local ordinal, reason = ARGV[i], ARGV[i + 1]
  if has(run, ordinal) and has_failed(run, ordinal) then
    reopened[#reopened + 1] = tonumber(ordinal)
    if redis.call('SETBIT', part_key(run, 'done'), ordinal, 0) == 1 then
      new, cursor = true, math.min(cursor, ordinal)
      redis.call('HINCRBY', key, 'failed', -1)
      if redis.call('HINCRBY', key, 'failed:' .. reason, -1) <= 0 then redis.call('HDEL', key, 'failed:' .. reason) end
    end
  end
end
if new then
  -- Not all of them become pending at once: feed comes by again, and passes over what is done or open.
  redis.call('HSET', key, 'cursor', int(cursor))
  if state == 'finished' then
    redis.call('HSET', key, 'state', 'active')
    redis.call('HDEL', key, 'finished_at', 'rate_since', 'rate_rows', 'rate_tokens', 'next_since', 'next_rows',
      'next_tokens')
    begin_window(run)
    begin_window(run)
  end
  redis.call('PERSIST', key)
  for _, part in ipairs({'done', 'failed', 'dead'}) do redis.call('PERSIST', part_key(run, part)) end
end
return reopened
