-- ARGV: run, expected cursor, then for each next ordinal "" (extract it) or the reason of its rejection.
-- Returns the new cursor, which is beyond what is done, or -1 when another dispatcher moved it.
local run, cursor = ARGV[1], tonumber(ARGV[2])
local key = run_key(run)
local at, total, state = unpack(redis.call('HMGET', key, 'cursor', 'total', 'state'))
if not at or tonumber(at) ~= cursor or state ~= 'active' then return -1 end
local reached = math.min(cursor + #ARGV - 2, tonumber(total))
for i = 3, reached - cursor + 2 do
  local ordinal, reason = int(cursor + i - 3), ARGV[i]
  if not is_done(run, ordinal) and redis.call('HEXISTS', part_key(run, 'open'), ordinal) == 0 then
    local sample = {state = 'pending', attempts = 0, live = '', captured = '', job = 0, reason = reason}
    if reason == '' then
      redis.call('RPUSH', part_key(run, 'pending'), ordinal)
    else
      sample.state = 'rejected'
      redis.call('ZADD', part_key(run, 'recording'), 0, ordinal)
    end
    save(run, ordinal, sample)
  end
end
-- The first sample that is not done; BITPOS looks from a byte on, and knows nothing of what lies beyond the last bit.
local open = redis.call('BITPOS', part_key(run, 'done'), 0, math.floor(reached / 8))
if open > reached then reached = open end
while is_done(run, int(reached)) do reached = reached + 1 end
reached = math.min(reached, tonumber(total))
redis.call('HSET', key, 'cursor', int(reached))
check_finished(run)
return reached
