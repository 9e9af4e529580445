-- Forgets a site whose registration lapsed and whose captured samples went back. ARGV: site. Returns 1 when evicted.
local site = ARGV[1]
if redis.call('EXISTS', site_key(site)) == 1 or redis.call('ZCARD', site_part(site, 'captured')) > 0 then return 0 end
redis.call('DEL', site_part(site, 'credits'), site_part(site, 'captured'), site_part(site, 'storing'))
return redis.call('SREM', 'hr:sites', site)
