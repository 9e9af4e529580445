-- Keeps two notes of the verdicts on first attempts, of which `window` is the older one.
-- ARGV: run, least verdicts between notes.
local key = run_key(ARGV[1])
local verdicts, newer = unpack(redis.call('HMGET', key, 'first_verdicts', 'next_window'))
if (tonumber(verdicts) or 0) - noted_verdicts(newer) < tonumber(ARGV[2]) then return 0 end
redis.call('HSET', key, 'window', newer or '{}', 'next_window', verdict_note(ARGV[1]))
return 1
