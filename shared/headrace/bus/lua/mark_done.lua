-- Manifest lines exist. ARGV: run, then ordinal, status, tokens, bytes, reason, request for each line.
-- Returns how many were new.
local run, new = ARGV[1], 0
for i = 2, #ARGV, 6 do
  if finish(run, ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5]) then new = new + 1 end
end
check_finished(run)
return new
