"""The scripts that make each change of a run in Redis at once. Each may be repeated by the same call without harm.

KEYS are `RunKeys.all`; ARGV[1] begins the names of the channels. The scripts are deterministic (Redis 6.2 may replicate
them by their text) and begin their writing with a command that a full Redis allows, wherever they free memory or only
move what is there.
"""

from __future__ import annotations

HEAD = """
local META, WAITING, LEASED, ITEMS, KNOWN = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local ENDED, HELD, LEASES, REWOUND = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local call = redis.call

local function epoch() return tonumber(call('HGET', META, 'fence') or '0') end

local function counts()
  return {call('ZCARD', WAITING), call('ZCARD', LEASED), epoch(), tonumber(call('HGET', META, 'refs') or '0')}
end

local function tell(topic) call('PUBLISH', ARGV[1] .. topic, table.concat(counts(), ' ')) end

local function let_go(id)
  local token = call('HGET', HELD, id)
  if token then
    call('HDEL', HELD, id)
    if call('HINCRBY', LEASES, token, -1) <= 0 then call('HDEL', LEASES, token) end
  end
end

local function finish(id, reason)
  call('ZREM', WAITING, id)
  call('ZREM', LEASED, id)
  call('HDEL', ITEMS, id)
  let_go(id)
  local known = call('HGET', KNOWN, id) or string.rep('0', 32)
  call('HSET', KNOWN, id, string.sub(known, 1, 32) .. reason)
  call('ZADD', ENDED, call('HINCRBY', META, 'ended', 1), id)
end

local function trim(limit)
  local over = call('ZCARD', ENDED) - limit
  if over > 0 then
    for _, id in ipairs(call('ZRANGE', ENDED, 0, over - 1)) do call('HDEL', KNOWN, id) end
    call('ZREMRANGEBYRANK', ENDED, 0, over - 1)
  end
end

local function held_by(token)
  local ids = {}
  if call('HEXISTS', LEASES, token) == 1 then
    for _, id in ipairs(call('ZRANGE', LEASED, 0, -1)) do
      if call('HGET', HELD, id) == token then ids[#ids + 1] = id end
    end
  end
  return ids
end

local function back(id)
  local arrived = call('ZSCORE', LEASED, id)
  call('ZREM', LEASED, id)
  call('ZADD', WAITING, arrived, id)
end
"""

# token -> epoch
FENCE = """
if call('HGET', META, 'fence_token') ~= ARGV[2] then
  call('HDEL', META, 'fence_token')
  call('HINCRBY', META, 'fence', 1)
  call('HSET', META, 'fence_token', ARGV[2])
  tell('items')
end
return epoch()
"""

# cap, id, token, item or nothing (then it only asks) -> accepted, duplicate, blocked or (if it only asked) room
PUT = """
local cap, id, token, item = tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
local known = call('HGET', KNOWN, id)
if known then
  if string.sub(known, 1, 32) == token then return 'accepted' end
  return 'duplicate'
end
if call('ZCARD', WAITING) + call('ZCARD', LEASED) >= cap then return 'blocked' end
if item == '' then return 'room' end
call('HSET', ITEMS, id, item)
call('HSET', KNOWN, id, token)
call('ZADD', WAITING, call('HINCRBY', META, 'next', 1), id)
tell('items')
return 'accepted'
"""

# n, fence, token, bytes that the reply may have
# -> {fenced, epoch}, {wait, counts…}, or {leased, id, item, …}: 0 for an item that is to be fetched by itself
LEASE = """
local n, token, budget = tonumber(ARGV[2]), ARGV[4], tonumber(ARGV[5])
if epoch() ~= tonumber(ARGV[3]) then return {'fenced', epoch()} end
local ids = held_by(token)
local missing = n - #ids
if missing > 0 then
  if call('ZCARD', WAITING) < missing then
    local answer = counts()
    table.insert(answer, 1, 'wait')
    return answer
  end
  local oldest = call('ZRANGE', WAITING, 0, missing - 1, 'WITHSCORES')
  for place = 1, #oldest, 2 do
    local id, arrived = oldest[place], oldest[place + 1]
    call('ZREM', WAITING, id)
    call('ZADD', LEASED, arrived, id)
    call('HSET', HELD, id, token)
    ids[#ids + 1] = id
  end
  call('HINCRBY', LEASES, token, missing)
end
local answer = {'leased'}
for _, id in ipairs(ids) do
  answer[#answer + 1] = id
  budget = budget - call('HSTRLEN', ITEMS, id)
  if budget >= 0 then answer[#answer + 1] = call('HGET', ITEMS, id) else answer[#answer + 1] = 0 end
end
return answer
"""

# token: the lease was cancelled
GIVE_BACK = """
local ids = held_by(ARGV[2])
for _, id in ipairs(ids) do
  let_go(id)
  back(id)
end
if #ids > 0 then tell('items') end
return #ids
"""

# fence, ids to remember, id… -> {fenced, epoch} or {done}
COMMIT = """
if epoch() ~= tonumber(ARGV[2]) then return {'fenced', epoch()} end
for place = 4, #ARGV do finish(ARGV[place], 'trained') end
trim(tonumber(ARGV[3]))
tell('room')
return {'done'}
"""

# fence or nothing, ids to remember, id, reason -> {fenced, epoch} or {done}
DISCARD = """
if ARGV[2] ~= '' and epoch() ~= tonumber(ARGV[2]) then return {'fenced', epoch()} end
finish(ARGV[4], ARGV[5])
trim(tonumber(ARGV[3]))
tell('room')
return {'done'}
"""

# fence, token -> {fenced, epoch} or {done, id…}
REWIND = """
if epoch() ~= tonumber(ARGV[2]) then return {'fenced', epoch()} end
if call('HGET', META, 'rewound') ~= ARGV[3] then
  call('DEL', REWOUND, HELD, LEASES)
  for _, id in ipairs(call('ZRANGE', LEASED, 0, -1)) do
    back(id)
    call('RPUSH', REWOUND, id)
  end
  call('HSET', META, 'rewound', ARGV[3])
  tell('items')
end
local answer = call('LRANGE', REWOUND, 0, -1)
table.insert(answer, 1, 'done')
return answer
"""

# policy reference
PUBLISH = """
call('HDEL', META, 'ref')
call('HSET', META, 'ref', ARGV[2])
call('HINCRBY', META, 'refs', 1)
tell('policy')
return 'done'
"""

COUNTS = "return counts()"
