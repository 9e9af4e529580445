-- ARGV: run, spec, digest, total, max_attempts, output. Returns created, same, other, or moved: rows may still be on
-- their way to the folder that was given before.
-- A cancelled run that is submitted again is rebuilt and goes on; a finished one stays finished.
local run, spec, digest, total, max_attempts = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local key = run_key(run)
local known = redis.call('HGET', key, 'digest')
if known and known ~= digest then return 'other' end
if known then
  local output, state = unpack(redis.call('HMGET', key, 'output', 'state'))
  if output ~= ARGV[6] and state ~= 'finished' and redis.call('HLEN', part_key(run, 'open')) > 0 then
    if state ~= 'cancelled' then return 'moved' end
    for _, sample in ipairs(redis.call('HVALS', part_key(run, 'open'))) do
      if decode(sample).state == 'captured' then return 'moved' end
    end
  end
end
redis.call('SADD', 'hr:runs', run)
if known then
  redis.call('HSET', key, 'spec', spec, 'max_attempts', max_attempts, 'output', ARGV[6])
  if redis.call('HGET', key, 'state') == 'cancelled' then redis.call('HSET', key, 'state', 'rebuilding') end
  return 'same'
end
-- What a run of this name left whose hash is gone would be neither counted nor fed again.
for _, part in ipairs({'pending', 'open', 'inflight', 'recording', 'done', 'failed', 'dead', 'spared'}) do
  redis.call('DEL', part_key(run, part))
end
redis.call('HSET', key, 'spec', spec, 'digest', digest, 'total', total, 'max_attempts', max_attempts, 'output', ARGV[6],
  'cursor', 0, 'state', 'rebuilding', 'reason', '', 'created_at', int(now_ms()))
return 'created'
