-- ARGV: run, state, reason, the reason that must hold now or "", then the states from which this is allowed.
-- Returns the state that holds now, or nil.
local run, state, reason, only = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local key = run_key(run)
local current, why = unpack(redis.call('HMGET', key, 'state', 'reason'))
if not current then return nil end
if only ~= '' and why ~= only then return current end
for i = 5, #ARGV do
  if ARGV[i] == current then
    redis.call('HSET', key, 'state', state, 'reason', reason, 'waiting_for', '')
    if state == 'active' and current ~= 'active' and only == '' then begin_window(run) end
    if state == 'active' then check_finished(run) end
    return redis.call('HGET', key, 'state')
  end
end
return current
