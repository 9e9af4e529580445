-- ARGV: run, spec, digest, total, max_attempts. Returns created, same or other.
-- A cancelled run that is submitted again is rebuilt and goes on; a finished one stays finished.
local run, spec, digest, total, max_attempts = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local key = run_key(run)
local known = redis.call('HGET', key, 'digest')
if known and known ~= digest then return 'other' end
redis.call('SADD', 'hr:runs', run)
if known then
  redis.call('HSET', key, 'spec', spec, 'max_attempts', max_attempts)
  if redis.call('HGET', key, 'state') == 'cancelled' then redis.call('HSET', key, 'state', 'rebuilding') end
  return 'same'
end
-- What a run of this name left whose hash is gone would be neither counted nor fed again.
for _, part in ipairs({'pending', 'open', 'inflight', 'recording', 'done', 'dead'}) do
  redis.call('DEL', part_key(run, part))
end
redis.call('HSET', key, 'spec', spec, 'digest', digest, 'total', total, 'max_attempts', max_attempts,
  'cursor', 0, 'state', 'rebuilding', 'reason', '', 'created_at', int(now_ms()))
return 'created'
