-- Samples that failed are to be extracted again, also those whose line is not written yet. ARGV: run, then ordinals.
-- Returns {ordinal, reason, ...} of those that are open after a failure; the same again when repeated.
local run, reopened, new = ARGV[1], {}, false
local key = run_key(run)
local cursor, state = unpack(redis.call('HMGET', key, 'cursor', 'state'))
for i = 2, cursor and #ARGV or 0 do
  local ordinal = ARGV[i]
  local sample = load(run, ordinal)
  if sample and sample.state == 'failed' then
    -- Its record job may be on its way: the line that it writes closes nothing, for it is that of an earlier failure.
    redis.call('HSET', part_key(run, 'failed'), ordinal, sample.reason)
    redis.call('ZREM', part_key(run, 'recording'), ordinal)
    redis.call('HDEL', part_key(run, 'spared'), ordinal)
    redis.call('RPUSH', part_key(run, 'pending'), ordinal)
    sample.state, sample.attempts, sample.live, sample.reason = 'pending', 0, '', ''
    save(run, ordinal, sample)
  end
  local reason = has(run, ordinal) and failure_of(run, ordinal)
  if reason then
    reopened[#reopened + 1] = ordinal
    reopened[#reopened + 1] = reason
    if redis.call('SETBIT', part_key(run, 'done'), ordinal, 0) == 1 then
      new, cursor = true, math.min(cursor, ordinal)
      uncount_failure(run, reason)
    end
  end
end
if new then
  -- Not all of them become pending at once: feed comes by again, and passes over what is done or open.
  redis.call('HSET', key, 'cursor', int(cursor))
  if state == 'finished' then
    redis.call('HSET', key, 'state', 'active', 'reopened_at', int(now_ms()))
    redis.call('HDEL', key, 'finished_at')
    forget_rate(run)
    begin_window(run)
  end
  redis.call('PERSIST', key)
  for _, part in ipairs({'done', 'failed', 'dead'}) do redis.call('PERSIST', part_key(run, part)) end
end
return reopened
