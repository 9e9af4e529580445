-- ARGV: run, state, reason, then the states from which this is allowed. Returns the state that holds now, or nil.
local run, state, reason = ARGV[1], ARGV[2], ARGV[3]
local key = run_key(run)
local current = redis.call('HGET', key, 'state')
if not current then return nil end
for i = 4, #ARGV do
  if ARGV[i] == current then
    redis.call('HSET', key, 'state', state, 'reason', reason)
    if state == 'active' then check_finished(run) end
    return redis.call('HGET', key, 'state')
  end
end
return current
