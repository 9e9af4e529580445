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

-- Ordinals come from names of files and lines of manifests: one outside the run must not grow its bitmap.
local function has(run, ordinal)
  local total = redis.call('HGET', run_key(run), 'total')
  return total and tonumber(ordinal) >= 0 and tonumber(ordinal) < tonumber(total)
end

local function is_done(run, ordinal)
  return has(run, ordinal) and redis.call('GETBIT', part_key(run, 'done'), ordinal) == 1
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
  local total, state, stored, rejected, failed =
    unpack(redis.call('HMGET', key, 'total', 'state', 'stored', 'rejected', 'failed'))
  if total and state ~= 'cancelled'
      and (tonumber(stored) or 0) + (tonumber(rejected) or 0) + (tonumber(failed) or 0) >= tonumber(total) then
    local time = int(now_ms())
    redis.call('HSET', key, 'state', 'finished', 'reason', '', 'waiting_for', '')
    redis.call('HSETNX', key, 'finished_at', time)
    redis.call('PEXPIRE', key, RUN_TTL_MS)
    for _, part in ipairs({'done', 'failed', 'dead'}) do redis.call('PEXPIRE', part_key(run, part), RUN_TTL_MS) end
  end
end

-- The run and the ordinal inside hr-{run}-{ordinal}-...
local function run_of(request) return string.match(request, '^hr%-(%w+)%-') end
local function ordinal_of(request) return string.match(request, '^hr%-%w+%-(%d+)%-') end

-- Whether the sample's last end was a failure: it is done by it, or else was reopened since.
local function has_failed(run, ordinal) return redis.call('GETBIT', part_key(run, 'failed'), ordinal) == 1 end

-- Sets the done bit, counts once, and closes the sample. Returns whether it was open until now.
-- A live request of the sample keeps its lease and its credit until it ends, for the engine still works on it.
local function finish(run, ordinal, status, tokens, bytes, reason, request)
  if not has(run, ordinal) or is_done(run, ordinal) then return false end
  local sample, failed = load(run, ordinal), status == 'failed'
  if has_failed(run, ordinal) ~= failed then
    redis.call('SETBIT', part_key(run, 'failed'), ordinal, failed and 1 or 0)
  elseif failed and not (sample and sample.state == 'failed' and sample.live == request) then
    return false  -- reopened: of its failed lines only that of the attempt which it has failed with since closes it
  end
  redis.call('SETBIT', part_key(run, 'done'), ordinal, 1)
  local key = run_key(run)
  redis.call('HINCRBY', key, status, 1)
  if status == 'stored' then
    redis.call('HINCRBY', key, 'tokens', tokens)
    redis.call('HINCRBY', key, 'bytes', bytes)
  else
    redis.call('HINCRBY', key, status .. ':' .. reason, 1)
  end
  if sample and sample.state == 'pending' then redis.call('LREM', part_key(run, 'pending'), 1, ordinal) end
  if sample and sample.captured ~= '' then
    release(run, sample.captured, redis.call('HGET', request_key(sample.captured), 'site'))
    redis.call('DEL', request_key(sample.captured))
  end
  redis.call('HDEL', part_key(run, 'open'), ordinal)
  redis.call('ZREM', part_key(run, 'recording'), ordinal)
  return true
end

-- What verdicts came to until now, as JSON: a note from which later ones are counted.
local function verdict_note(run)
  local note, fields = {}, redis.call('HGETALL', run_key(run))
  for i = 1, #fields, 2 do
    local name = fields[i]
    if name == 'verdicts' or name == 'mismatches' or string.find(name, '^reason:') then
      note[name] = tonumber(fields[i + 1])
    end
  end
  return cjson.encode(note)
end

-- Somebody wants the run to go on: what its verdicts came to before pauses it no more.
local function begin_window(run)
  local note = verdict_note(run)
  redis.call('HSET', run_key(run), 'window', note, 'next_window', note)
end

local function noted_verdicts(note) return note and cjson.decode(note).verdicts or 0 end

-- A refused dump counts once, also when its attempt had ended before the dump came.
local function count_refusal(run, request, reason)
  if redis.call('HSETNX', request_key(request), 'refused', reason) == 0 then return end
  local key = run_key(run)
  if redis.call('HSETNX', request_key(request), 'judged', 1) == 1 then redis.call('HINCRBY', key, 'verdicts', 1) end
  redis.call('HINCRBY', key, 'mismatches', 1)
  redis.call('HINCRBY', key, 'reason:' .. reason, 1)
end

-- Closes an attempt that brought no row: the live one, or the captured one whose dump is gone, which always burns.
-- With unless_captured the latter goes on: its dump was proven, whatever else is said of the request.
-- kind is mismatch, loss or error. Returns pending, failed, captured, stale or unknown; the same again when repeated.
local function end_attempt(run, request, ordinal, burn, kind, reason, unless_captured)
  local key = run_key(run)
  local limit = redis.call('HGET', key, 'max_attempts')
  local site, ended = unpack(redis.call('HMGET', request_key(request), 'site', 'outcome'))
  local sample = load(run, ordinal)
  local live = sample and sample.state == 'in_flight' and sample.live == request
  local captured = sample and sample.state == 'captured' and sample.captured == request
  if not limit or not (site or live or captured) then
    release(run, request, site)
    return 'unknown'
  end
  if captured and unless_captured then return 'captured' end
  if kind == 'mismatch' then count_refusal(run, request, reason) end
  if ended then return ended end
  release(run, request, site)
  local outcome = 'stale'
  if live or captured then
    if live and not burn then
      sample.attempts = sample.attempts - 1
    else
      redis.call('XADD', part_key(run, 'dead'), 'MAXLEN', '~', DEAD_LENGTH, '*',
        'request', request, 'attempt', int(sample.attempts), 'reason', reason)
    end
    sample.live, sample.captured, sample.job = '', '', 0
    if sample.attempts >= tonumber(limit) then
      sample.state, sample.live, sample.reason, outcome = 'failed', request, reason, 'failed'
      redis.call('ZADD', part_key(run, 'recording'), 0, ordinal)
    else
      sample.state, outcome = 'pending', 'pending'
      redis.call('RPUSH', part_key(run, 'pending'), ordinal)
    end
    save(run, ordinal, sample)
  end
  if kind ~= 'mismatch' then redis.call('HINCRBY', key, 'reason:' .. reason, 1) end
  redis.call('HSET', request_key(request), 'outcome', outcome)
  redis.call('PEXPIRE', request_key(request), ENDED_TTL_MS)
  return outcome
end
