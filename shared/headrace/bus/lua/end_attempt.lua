-- ARGV: run, request, ordinal, burn (0, 1 or if_alone), kind, reason, unless captured (0 or 1),
-- counted (0 or 1).
-- Returns pending, failed, captured, stale or unknown.
return end_attempt(ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7] == '1', ARGV[8] == '1')
