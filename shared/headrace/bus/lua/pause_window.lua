-- Pauses an active run for what the verdicts of its window came to, unless it has another window by now: it was resumed
-- meanwhile, or the window moved on. ARGV: run, reason, the verdicts before the window. Returns whether it was paused.
local key = run_key(ARGV[1])
local state, window = unpack(redis.call('HMGET', key, 'state', 'window'))
if state ~= 'active' or noted_verdicts(window) ~= tonumber(ARGV[3]) then return 0 end
redis.call('HSET', key, 'state', 'paused', 'reason', ARGV[2], 'waiting_for', '')
return 1
