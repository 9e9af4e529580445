-- Forgets a site whose registration lapsed and that nothing holds on to: no captured sample, no request that its
-- engine may still work on. ARGV: site. Returns 1 when evicted.
local site = ARGV[1]
if redis.call('EXISTS', site_key(site), site_part(site, 'credits'), site_part(site, 'captured')) > 0 then return 0 end
redis.call('DEL', site_part(site, 'storing'))
return redis.call('SREM', 'hr:sites', site)
