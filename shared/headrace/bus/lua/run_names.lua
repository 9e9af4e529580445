-- Names of all runs; those of expired ones are dropped.
local names = {}
for _, run in ipairs(redis.call('SMEMBERS', 'hr:runs')) do
  if redis.call('EXISTS', run_key(run)) == 1 then
    names[#names + 1] = run
  else
    redis.call('SREM', 'hr:runs', run)
  end
end
return names
