-- Ends captured samples whose dump nobody holds, opens the next storage job where a storing lease lapsed, and drops
-- credits past their end. ARGV: site, most, storing lease (ms), the ms before which a lease must have ended ("": now).
-- Returns {ended, {request, job, mask, sample, engine, weight version, ...}}.
local site, most = ARGV[1], ARGV[2]
local time = now_ms()
local before = tonumber(ARGV[4]) or time
local ended, jobs = {}, {}
for _, request in ipairs(redis.call('ZRANGEBYSCORE', site_part(site, 'captured'), 0, int(before), 'LIMIT', 0, most)) do
  end_attempt(run_of(request), request, ordinal_of(request), '1', 'error', 'dump_gone')
  redis.call('ZREM', site_part(site, 'captured'), request)
  redis.call('ZREM', site_part(site, 'storing'), request)
  ended[#ended + 1] = request
end
for _, request in ipairs(redis.call('ZRANGEBYSCORE', site_part(site, 'storing'), 0, int(before), 'LIMIT', 0, most)) do
  local mask, name = unpack(redis.call('HMGET', request_key(request), 'mask', 'sample'))
  local run, ordinal = run_of(request), ordinal_of(request)
  local sample = mask and load(run, ordinal)
  if sample and sample.state == 'captured' and sample.captured == request then
    sample.job = redis.call('HINCRBY', request_key(request), 'k', 1)
    save(run, ordinal, sample)
    redis.call('ZADD', site_part(site, 'storing'), int(time + ARGV[3]), request)
    local engine, weights = unpack(redis.call('HMGET', run_key(run), 'engine', 'weight_version'))
    for _, value in ipairs({request, int(sample.job), mask, name, engine, weights}) do jobs[#jobs + 1] = value end
  else
    redis.call('ZREM', site_part(site, 'storing'), request)
  end
end
local credits = redis.call('HGETALL', site_part(site, 'credits'))
for i = 1, #credits, 2 do
  local till = string.match(credits[i + 1], ' (%d+)$')
  if not till or tonumber(till) < before then redis.call('HDEL', site_part(site, 'credits'), credits[i]) end
end
return {ended, jobs}
