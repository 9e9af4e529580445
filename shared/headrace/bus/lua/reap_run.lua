-- Ends attempts whose in-flight lease lapsed, and leases records to be written.
-- ARGV: run, most, record lease (ms), the ms before which a lease must have ended ("": now).
-- Returns {{request, outcome, reason, ...}, {ordinal, state, reason, request, ...}}.
local run, most = ARGV[1], ARGV[2]
local time = now_ms()
local before = int(tonumber(ARGV[4]) or time)
local lapsed = redis.call('ZRANGEBYSCORE', part_key(run, 'inflight'), 0, before, 'LIMIT', 0, most)
local ended = {}
for _, request in ipairs(lapsed) do
  local answered = redis.call('HGET', request_key(request), 'answered')
  local reason = answered and 'no_dump' or 'lapsed'
  local outcome = end_attempt(run, request, ordinal_of(request), '1', 'error', reason)
  redis.call('ZREM', part_key(run, 'inflight'), request)
  for _, value in ipairs({request, outcome, reason}) do ended[#ended + 1] = value end
end
local records = {}
local waiting = redis.call('ZRANGEBYSCORE', part_key(run, 'recording'), 0, int(time), 'LIMIT', 0, most)
for _, ordinal in ipairs(waiting) do
  local sample = load(run, ordinal)
  if sample and (sample.state == 'failed' or sample.state == 'rejected') then
    redis.call('ZADD', part_key(run, 'recording'), int(time + ARGV[3]), ordinal)
    for _, value in ipairs({ordinal, sample.state, sample.reason, sample.live}) do records[#records + 1] = value end
  else
    redis.call('ZREM', part_key(run, 'recording'), ordinal)
  end
end
return {ended, records}
