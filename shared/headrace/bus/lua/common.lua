-- Keys, values and transitions that several scripts share. Prepended to each of them.
-- A sample in hr:run:{run}:open is "state|attempts|live|captured|job|reason" (headrace.lifecycle.Sample).

local RUN_TTL_MS = 30 * 86400 * 1000     -- a finished run
local REQUEST_TTL_MS = 2 * 86400 * 1000  -- a request that nobody renews
local ENDED_TTL_MS = 3600 * 1000         -- a failed request: its dump may still come
local DEAD_LENGTH = 10000
local SPARED = 5  -- answers of one sample that cost no attempt each, and one together

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

-- The request is on its way to the site's engine, or with it. Requests that hold credits of a site at the same time are
-- marked for it: when the engine fails, nobody can tell on which of them. While two or more do, all of them are marked.
local function hold_credit(site, request, credit)
  local key = site_part(site, 'credits')
  if redis.call('HSET', key, request, credit) == 0 then return end
  local held = redis.call('HLEN', key)
  if held == 1 then return end
  for _, other in ipairs(held == 2 and redis.call('HKEYS', key) or {request}) do
    if redis.call('EXISTS', request_key(other)) == 1 then redis.call('HSET', request_key(other), 'beside_others', 1) end
  end
end

-- Whether the site's engine had no request of any dispatcher but this one, from its claim until now.
local function was_alone(site, request)
  return redis.call('HEXISTS', site_part(site, 'credits'), request) == 1
    and redis.call('HEXISTS', request_key(request), 'beside_others') == 0
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

-- The reason of the failure that was the sample's last end: it is done by it, or else was reopened since. false: of none.
local function failure_of(run, ordinal) return redis.call('HGET', part_key(run, 'failed'), ordinal) end

local function has_failed(run, ordinal) return failure_of(run, ordinal) ~= false end

-- The sample is no longer done by its failure.
local function uncount_failure(run, reason)
  local key = run_key(run)
  redis.call('HINCRBY', key, 'failed', -1)
  if redis.call('HINCRBY', key, 'failed:' .. reason, -1) <= 0 then redis.call('HDEL', key, 'failed:' .. reason) end
end

-- Sets the done bit, counts once, and closes the sample. Returns whether it was open until now, or done by a failure,
-- over which every other line wins.
-- A live request of the sample keeps its lease and its credit until it ends, for the engine still works on it.
local function finish(run, ordinal, status, tokens, bytes, reason, request)
  if not has(run, ordinal) then return false end
  local done, failure, sample = is_done(run, ordinal), failure_of(run, ordinal), load(run, ordinal)
  if done and not (failure and status ~= 'failed') then return false end
  if status == 'failed' then
    -- Of a reopened sample's failed lines only that of the attempt which it has failed with since closes it.
    if failure and not (sample and sample.state == 'failed' and sample.live == request) then return false end
    redis.call('HSET', part_key(run, 'failed'), ordinal, reason)
  elseif failure then
    redis.call('HDEL', part_key(run, 'failed'), ordinal)
    if done then uncount_failure(run, failure) end
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
  for _, part in ipairs({'open', 'spared'}) do redis.call('HDEL', part_key(run, part), ordinal) end
  redis.call('ZREM', part_key(run, 'recording'), ordinal)
  return true
end

-- What verdicts on first attempts came to until now, as JSON: a note from which later ones are counted.
local function verdict_note(run)
  local note, fields = {}, redis.call('HGETALL', run_key(run))
  for i = 1, #fields, 2 do
    if string.find(fields[i], '^first_') then note[fields[i]] = tonumber(fields[i + 1]) end
  end
  return cjson.encode(note)
end

-- Somebody wants the run to go on: what its verdicts came to before pauses it no more.
local function begin_window(run)
  local note = verdict_note(run)
  redis.call('HSET', run_key(run), 'window', note, 'next_window', note)
end

local function noted_verdicts(note) return note and cjson.decode(note).first_verdicts or 0 end

-- The rate over the last half minute begins anew.
local function forget_rate(run)
  redis.call('HDEL', run_key(run), 'rate_since', 'rate_rows', 'rate_tokens', 'next_since', 'next_rows', 'next_tokens')
end

-- Verdicts count once a request; those on first attempts (claim.lua) once more, for the window.
local function count_verdict(run, request)
  if redis.call('HSETNX', request_key(request), 'judged', 1) == 0 then return end
  redis.call('HINCRBY', run_key(run), 'verdicts', 1)
  if redis.call('HEXISTS', request_key(request), 'first') == 1 then
    redis.call('HINCRBY', run_key(run), 'first_verdicts', 1)
  end
end

-- A refused dump counts once, also when its attempt had ended before the dump came.
local function count_refusal(run, request, reason)
  if redis.call('HSETNX', request_key(request), 'refused', reason) == 0 then return end
  local key = run_key(run)
  count_verdict(run, request)
  redis.call('HINCRBY', key, 'mismatches', 1)
  redis.call('HINCRBY', key, 'reason:' .. reason, 1)
  if redis.call('HEXISTS', request_key(request), 'first') == 1 then
    redis.call('HINCRBY', key, 'first_mismatches', 1)
    redis.call('HINCRBY', key, 'first_reason:' .. reason, 1)
  end
end

-- The live attempt is to cost nothing: counts it for its sample. Returns whether it costs an attempt all the same.
local function is_spared_too_often(run, ordinal)
  local key = part_key(run, 'spared')
  if redis.call('HINCRBY', key, ordinal, 1) < SPARED then return false end
  redis.call('HDEL', key, ordinal)
  return true
end

-- Closes an attempt that brought no row: the live one, or the captured one whose dump is gone, which always burns.
-- With unless_captured the latter goes on: its dump was proven, whatever else is said of the request.
-- burn is 1, 0, or if_alone: only if the engine had no other request beside it. With counted, of those of a sample that
-- burn nothing each fifth burns.
-- kind is mismatch, loss or error. Returns pending, failed, captured, stale or unknown; the same again when repeated.
local function end_attempt(run, request, ordinal, burn, kind, reason, unless_captured, counted)
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
  local burns = burn == '1' or (burn == 'if_alone' and site and was_alone(site, request))
  release(run, request, site)
  local outcome = 'stale'
  if live or captured then
    if live and not burns and not (counted and is_spared_too_often(run, ordinal)) then
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
