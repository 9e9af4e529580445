-- Keys, values and transitions that several scripts share. Prepended to each of them.
-- A sample in hr:run:{run}:open is "state|attempts|live|captured|job|reason" (headrace.lifecycle.Sample).

local RUN_TTL_MS = 30 * 86400 * 1000     -- a finished run
local REQUEST_TTL_MS = 2 * 86400 * 1000  -- a request that nobody renews
local ENDED_TTL_MS = 3600 * 1000         -- a failed request: its dump may still come
local DEAD_LENGTH = 10000

local function run_key(run) return 'hr:run:' .. run end
local function part_key(run, part) return 'hr:run:' .. run .. ':' .. part end
local function request_key(request) return 'hr:req:' .. request end
local function site_key(site) return 'hr:site:' .. site end
local function site_part(site, part) return 'hr:site:' .. site .. ':' .. part end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Whole milliseconds: Lua would write a large number as 1.7e+12.
local function int(number) return string.format('%d', number) end

local function decode(text)
  if not text then return nil end
  local state, attempts, live, captured, job, reason =
    string.match(text, '^([^|]*)|([^|]*)|([^|]*)|([^|]*)|([^|]*)|(.*)$')
  return {state = state, attempts = tonumber(attempts), live = live, captured = captured,
          job = tonumber(job), reason = reason}
end

local function load(run, ordinal) return decode(redis.call('HGET', part_key(run, 'open'), ordinal)) end

local function save(run, ordinal, s)
  redis.call('HSET', part_key(run, 'open'), ordinal,
    table.concat({s.state, int(s.attempts), s.live, s.captured, int(s.job), s.reason}, '|'))
end

local function is_done(run, ordinal)
  return redis.call('GETBIT', part_key(run, 'done'), ordinal) == 1
end

-- The request no longer holds anything anywhere.
local function release(run, request, site)
  redis.call('ZREM', part_key(run, 'inflight'), request)
  if site and site ~= '' then
    redis.call('HDEL', site_part(site, 'credits'), request)
    redis.call('ZREM', site_part(site, 'captured'), request)
    redis.call('ZREM', site_part(site, 'storing'), request)
  end
end

local function check_finished(run)
  local key = run_key(run)
  local fields = redis.call('HMGET', key, 'cursor', 'total', 'state')
  if fields[1] and tonumber(fields[1]) >= tonumber(fields[2]) and fields[3] ~= 'cancelled'
      and redis.call('HLEN', part_key(run, 'open')) == 0 then
    local time = int(now_ms())
    redis.call('HSET', key, 'state', 'finished', 'reason', '')
    redis.call('HSETNX', key, 'finished_at', time)
    redis.call('PEXPIRE', key, RUN_TTL_MS)
    redis.call('PEXPIRE', part_key(run, 'done'), RUN_TTL_MS)
    redis.call('PEXPIRE', part_key(run, 'dead'), RUN_TTL_MS)
  end
end

-- The run and the ordinal inside hr-{run}-{ordinal}-...
local function run_of(request) return string.match(request, '^hr%-(%w+)%-') end
local function ordinal_of(request) return string.match(request, '^hr%-%w+%-(%d+)%-') end

-- Sets the done bit, counts once, and closes the sample. Returns whether it was open until now.
local function finish(run, ordinal, status, tokens, bytes, reason)
  if redis.call('SETBIT', part_key(run, 'done'), ordinal, 1) == 1 then return false end
  local key = run_key(run)
  redis.call('HINCRBY', key, status, 1)
  if status == 'stored' then
    redis.call('HINCRBY', key, 'tokens', tokens)
    redis.call('HINCRBY', key, 'bytes', bytes)
  else
    redis.call('HINCRBY', key, status .. ':' .. reason, 1)
  end
  local sample = load(run, ordinal)
  if sample and sample.state == 'pending' then redis.call('LREM', part_key(run, 'pending'), 1, ordinal) end
  redis.call('HDEL', part_key(run, 'open'), ordinal)
  redis.call('ZREM', part_key(run, 'recording'), ordinal)
  return true
end

-- Closes an attempt that brought no row: the live one, or the captured one whose dump is gone.
-- kind is mismatch, loss or error. Returns pending, failed or stale; the same again when repeated.
local function end_attempt(run, request, ordinal, burn, kind, reason)
  local req = redis.call('HMGET', request_key(request), 'site', 'outcome')
  if req[2] then return req[2] end
  local sample = load(run, ordinal)
  local current = sample and ((sample.state == 'in_flight' and sample.live == request)
    or (sample.state == 'captured' and sample.captured == request))
  if not req[1] and not current then return 'unknown' end
  release(run, request, req[1])
  local outcome = 'stale'
  local key = run_key(run)
  if current then
    if not burn then sample.attempts = math.max(0, sample.attempts - 1) end
    local limit = tonumber(redis.call('HGET', key, 'max_attempts') or '1')
    sample.live, sample.captured, sample.job = '', '', 0
    if sample.attempts >= limit then
      sample.state, sample.live, sample.reason = 'failed', request, reason
      redis.call('ZADD', part_key(run, 'recording'), 0, ordinal)
      outcome = 'failed'
    else
      sample.state = 'pending'
      redis.call('RPUSH', part_key(run, 'pending'), ordinal)
      outcome = 'pending'
    end
    save(run, ordinal, sample)
  end
  redis.call('HINCRBY', key, 'reason:' .. reason, 1)
  if kind == 'mismatch' then
    redis.call('HINCRBY', key, 'verdicts', 1)
    redis.call('HINCRBY', key, 'mismatches', 1)
  end
  if burn and sample then
    redis.call('XADD', part_key(run, 'dead'), 'MAXLEN', '~', DEAD_LENGTH, '*',
      'request', request, 'attempt', int(sample.attempts), 'reason', reason)
  end
  redis.call('HSET', request_key(request), 'outcome', outcome)
  redis.call('PEXPIRE', request_key(request), ENDED_TTL_MS)
  return outcome
end
