-- Guards Forebay's leases in slurmctld: a job comment that starts with `forebay/` is a promise that the
-- broker made the job, so only the service users may write one, and only a whole and fitting one.
--
-- Jobs without a stamp pass untouched. Settings come from `forebay_hooks.conf` beside this file, read
-- whenever a stamp turns up: a change there needs no restart, and a mistake there stops no other job.

local MARKER = "forebay/1"
local REFUSED = slurm.ERROR

local here = (debug.getinfo(1, "S").source:match("^@(.*/)") or "./")
local CONF = here .. "forebay_hooks.conf"

-- Return the settings as a table of word sets, or nil and the reason.
local function read_conf()
  local file, reason = io.open(CONF, "r")
  if not file then
    return nil, reason
  end
  local conf = {}
  for line in file:lines() do
    local key, value = line:match("^%s*([%w_]+)%s*=%s*(.-)%s*$")
    if key then
      local words = {}
      for word in value:gmatch("[^%s,]+") do
        words[word] = true
      end
      conf[key] = words
    end
  end
  file:close()
  for _, key in ipairs({ "cluster", "service_uids", "serve_partitions", "backfill_partitions" }) do
    if not conf[key] or not next(conf[key]) then
      return nil, CONF .. ": no " .. key
    end
  end
  return conf
end

local function is_stamp(comment)
  return comment ~= nil and comment:lower():match("^%s*forebay/") ~= nil
end

-- Return the stamp's values by key, or nil and what is wrong with it.
local function parse_stamp(comment)
  local stamp, first = {}, true
  for word in comment:gmatch("%S+") do
    if first then
      if word ~= MARKER then
        return nil, "it must start with " .. MARKER
      end
      first = false
    else
      local key, value = word:match("^([%w_]+)=(.+)$")
      if key and stamp[key] then
        return nil, key .. " is given twice"
      elseif key then
        stamp[key] = value
      end
    end
  end
  for _, key in ipairs({ "cluster", "lease", "kind", "team" }) do
    if not stamp[key] then
      return nil, key .. " is missing"
    end
  end
  if not stamp.lease:match("^[%w._-]+$") then
    return nil, "lease " .. stamp.lease .. " is not an identifier"
  end
  if stamp.kind ~= "serve" and stamp.kind ~= "backfill" then
    return nil, "kind must be serve or backfill, not " .. stamp.kind
  end
  return stamp
end

local function refuse(message)
  slurm.log_info("forebay: refused: %s", message)
  slurm.log_user("Forebay: %s", message)
  return REFUSED
end

local function is_service(conf, uid)
  return conf.service_uids[string.format("%.0f", uid)] == true
end

-- Return why a lease of this kind may not run in `partitions` (a comma list), or nil.
local function wrong_partition(conf, kind, partitions)
  if partitions == nil or partitions == "" then
    return "a " .. kind .. " lease must name its partition"
  end
  for name in partitions:gmatch("[^,]+") do
    if not conf[kind .. "_partitions"][name] then
      return "a " .. kind .. " lease may not run in partition " .. name
    end
  end
  return nil
end

local GPU_REQUESTS = { "tres_per_node", "tres_per_job", "tres_per_socket", "tres_per_task" }

-- GPUs, parts of one, or none on purpose, as its name says: a lease that forgot them would only hold a node.
local function asks_gpus(job)
  if type(job.name) == "string" and job.name:match("%-cpu$") then
    return true
  end
  for _, field in ipairs(GPU_REQUESTS) do
    local request = job[field]
    for _, kind in ipairs({ "gpu", "shard", "mps" }) do
      if type(request) == "string" and request:lower():match(kind) then
        return true
      end
    end
  end
  return false
end

-- Return the conf and the stamp of a comment that `uid` may write, or nil and why not.
local function check_stamp(comment, uid)
  local conf, reason = read_conf()
  if not conf then
    return nil, "leases can't be checked: " .. reason
  end
  if not is_service(conf, uid) then
    return nil, "only Forebay itself may give a job a comment that starts with forebay/: use another one"
  end
  local stamp, fault = parse_stamp(comment)
  if not stamp then
    return nil, "bad stamp: " .. fault
  end
  if not conf.cluster[stamp.cluster] then
    return nil, "the stamp is for cluster " .. stamp.cluster .. ", not for this one"
  end
  return conf, stamp
end

function slurm_job_submit(job, _, uid)
  if not is_stamp(job.comment) then
    return slurm.SUCCESS
  end
  local conf, stamp = check_stamp(job.comment, uid)
  if not conf then
    return refuse(stamp)
  end
  if not is_service(conf, job.user_id) then
    return refuse("a lease must run as one of Forebay's service users")
  end
  local fault = wrong_partition(conf, stamp.kind, job.partition)
  if fault then
    return refuse(fault)
  end
  if not asks_gpus(job) then
    return refuse("a lease must ask for GPUs (--gres=gpu:N, shard:N or mps:N), or be named forebay-...-cpu")
  end
  job.requeue = 0 -- a requeued lease would start an agent that its broker has long replaced
  return slurm.SUCCESS
end

function slurm_job_modify(job, record, _, uid)
  local was, becomes = is_stamp(record.comment), is_stamp(job.comment)
  if not was and not becomes then
    return slurm.SUCCESS
  end
  local conf, reason = read_conf()
  if not conf then
    return refuse("leases can't be checked: " .. reason)
  end
  if becomes then
    local found, fault = check_stamp(job.comment, uid)
    if not found then
      return refuse(fault)
    end
    if not is_service(conf, record.user_id) then
      return refuse("the job belongs to somebody else and can't become a lease")
    end
  elseif job.comment ~= nil and not is_service(conf, uid) then
    return refuse("the comment of a lease is changed by Forebay alone")
  end
  local stamp = parse_stamp(becomes and job.comment or record.comment)
  if stamp and job.partition ~= nil then
    local fault = wrong_partition(conf, stamp.kind, job.partition)
    if fault then
      return refuse(fault)
    end
  end
  return slurm.SUCCESS
end

slurm.log_info("forebay: job_submit.lua loaded, settings in %s", CONF)
return slurm.SUCCESS
