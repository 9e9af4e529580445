-- ARGV: run, request, ordinal, job, site, storing lease (ms). Returns go, done or stale; renews when repeated.
local run, request, ordinal = ARGV[1], ARGV[2], ARGV[3]
if is_done(run, ordinal) then return 'done' end
local sample = load(run, ordinal)
if not sample or sample.state ~= 'captured' or sample.captured ~= request or sample.job ~= tonumber(ARGV[4]) then
  return 'stale'
end
redis.call('ZADD', site_part(ARGV[5], 'storing'), int(now_ms() + ARGV[6]), request)
return 'go'
