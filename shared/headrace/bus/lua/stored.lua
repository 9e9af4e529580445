-- The row and its line exist. ARGV: run, request, ordinal, site, tokens, bytes. Returns stored, again or unknown_run.
local run, request, ordinal, site = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if redis.call('EXISTS', run_key(run)) == 0 then return 'unknown_run' end
local new = finish(run, ordinal, 'stored', ARGV[5], ARGV[6], '', request)
release(run, request, site)
redis.call('DEL', request_key(request))
check_finished(run)
return new and 'stored' or 'again'
