-- A proven dump. ARGV: run, request, ordinal, site, dump bytes, engine, weight version, captured lease, storing lease (ms).
-- Returns {outcome, job, mask, sample}: captured (the same again when repeated), duplicate, done, closed, identity,
-- unknown_run or unknown_request.
local run, request, ordinal, site = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local key = run_key(run)
if redis.call('EXISTS', key) == 0 then return {'unknown_run'} end
local req = redis.call('HMGET', request_key(request), 'mask', 'sample', 'site')
if is_done(run, ordinal) then
  release(run, request, req[3])
  redis.call('DEL', request_key(request))
  return {'done'}
end
local sample = load(run, ordinal)
if not req[1] or not sample then return {'unknown_request'} end
if sample.state == 'captured' then
  if sample.captured == request then return {'captured', int(sample.job), req[1], req[2]} end
  release(run, request, req[3])
  if redis.call('HSETNX', request_key(request), 'duplicate', 1) == 1 then redis.call('HINCRBY', key, 'reason:duplicate', 1) end
  redis.call('HSET', request_key(request), 'outcome', 'stale')
  redis.call('PEXPIRE', request_key(request), ENDED_TTL_MS)
  return {'duplicate'}
end
if sample.state == 'failed' or sample.state == 'rejected' then
  release(run, request, req[3])
  return {'closed'}
end
local engine, weights = unpack(redis.call('HMGET', key, 'engine', 'weight_version'))
if engine and (engine ~= ARGV[6] or weights ~= ARGV[7]) then return {'identity'} end
if not engine then redis.call('HSET', key, 'engine', ARGV[6], 'weight_version', ARGV[7]) end

if sample.state == 'pending' then redis.call('LREM', part_key(run, 'pending'), 1, ordinal) end
release(run, request, req[3])
if redis.call('EXISTS', site_key(site)) == 1 then redis.call('HINCRBY', site_key(site), 'dump_bytes', ARGV[5]) end
-- k never comes back for a request: its earlier storage jobs may still be known to RQ.
sample.job = redis.call('HINCRBY', request_key(request), 'k', 1)
sample.state, sample.live, sample.captured, sample.reason = 'captured', '', request, ''
save(run, ordinal, sample)
local time = now_ms()
redis.call('ZADD', site_part(site, 'captured'), int(time + ARGV[8]), request)
redis.call('ZADD', site_part(site, 'storing'), int(time + ARGV[9]), request)
redis.call('HSET', request_key(request), 'site', site)
redis.call('HDEL', request_key(request), 'outcome')
redis.call('PEXPIRE', request_key(request), REQUEST_TTL_MS)
count_verdict(run, request)
redis.call('SADD', 'hr:sites', site)
return {'captured', int(sample.job), req[1], req[2]}
