-- Samples that an earlier version closed by a failure, which kept no note of it. ARGV: run, then ordinal and reason of
-- the newest line of each sample that has failed lines alone. Notes those that are done, and no more than were counted.
local run, key = ARGV[1], part_key(ARGV[1], 'failed')
local unknown = tonumber(redis.call('HGET', run_key(run), 'failed')) or 0
for _, ordinal in ipairs(redis.call('HKEYS', key)) do
  if is_done(run, ordinal) then unknown = unknown - 1 end
end
for i = 2, #ARGV, 2 do
  if unknown > 0 and is_done(run, ARGV[i]) and redis.call('HSETNX', key, ARGV[i], ARGV[i + 1]) == 1 then
    unknown = unknown - 1
  end
end
check_finished(run)
return unknown
