-- ARGV: run, ordinal, reason. A pending sample that can never be extracted. Returns rejected or stale.
local run, ordinal = ARGV[1], ARGV[2]
local sample = load(run, ordinal)
if sample and sample.state == 'rejected' and sample.reason == ARGV[3] then return 'rejected' end
if not sample or sample.state ~= 'pending' then return 'stale' end
redis.call('LREM', part_key(run, 'pending'), 1, ordinal)
sample.state, sample.reason = 'rejected', ARGV[3]
save(run, ordinal, sample)
redis.call('ZADD', part_key(run, 'recording'), 0, ordinal)
return 'rejected'
