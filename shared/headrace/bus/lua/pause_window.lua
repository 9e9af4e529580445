-- Pauses an active run for what the verdicts of its window came to, unless it has another window by now (it was resumed
-- meanwhile, or the window moved on), or nothing is left to give out: it would end by itself, paused or not.
-- ARGV: run, reason, the verdicts before the window. Returns whether it was paused.
local run, key = ARGV[1], run_key(ARGV[1])
local state, window, total, stored, rejected, failed =
  unpack(redis.call('HMGET', key, 'state', 'window', 'total', 'stored', 'rejected', 'failed'))
if state ~= 'active' or noted_verdicts(window) ~= tonumber(ARGV[3]) then return 0 end
local done = (tonumber(stored) or 0) + (tonumber(rejected) or 0) + (tonumber(failed) or 0)
local unfed = tonumber(total) - done - redis.call('HLEN', part_key(run, 'open'))
if unfed <= 0 and redis.call('LLEN', part_key(run, 'pending')) == 0 then return 0 end
redis.call('HSET', key, 'state', 'paused', 'reason', ARGV[2], 'waiting_for', '')
return 1
