-- SPDX-License-Identifier: Apache-2.0
-- Asks the decision service which replica gets a request.
--
-- The request goes to the service as it came, with the part of its body that HAProxy holds. The
-- answer has one of two forms. With the header "x-vllm-slo-slot" it names the server for this
-- request, and the headers "x-vllm-slo-set-NAME" are set in the request. Without it the answer is
-- the client's. If the service does not answer, HAProxy chooses a server itself.

local SERVICE = os.getenv("VLLMSLO_DECISIONS")
local GENERATION = os.getenv("VLLMSLO_GENERATION")
local PATIENCE_S = 5
local START_TRIES = 50
local START_PAUSE_MS = 100
local OWN = "x-vllm-slo-"
local NOT_SENT = {
  ["connection"] = true, ["content-length"] = true, ["expect"] = true,
  ["transfer-encoding"] = true, ["x-vllm-slo-total"] = true,
}

-- The request for the service, as bytes.
local function question(txn, body)
  local lines = { txn.sf:method() .. " " .. txn.sf:pathq() .. " HTTP/1.1" }
  for name, values in pairs(txn.http:req_get_headers()) do
    if not NOT_SENT[name] then
      for place = 0, #values do
        lines[#lines + 1] = name .. ": " .. values[place]
      end
    end
  end
  local total = tonumber(txn.sf:hdr("content-length"))
  if total and #body < total then
    lines[#lines + 1] = "x-vllm-slo-total: " .. total
  end
  if not txn.sf:hdr("host") then
    lines[#lines + 1] = "host: none"
  end
  lines[#lines + 1] = "x-vllm-slo-generation: " .. GENERATION
  lines[#lines + 1] = "x-vllm-slo-exchange: " .. (txn:get_var("txn.slo_exchange") or "")
  lines[#lines + 1] = "connection: close"
  lines[#lines + 1] = "content-length: " .. #body
  lines[#lines + 1] = "\r\n"
  return table.concat(lines, "\r\n") .. body
end

-- (status, list of {name, value}, body) of a whole answer; nil: it is none.
local function parsed(answer)
  if not answer then return nil end
  local head, finish = answer:match("^(.-)\r\n\r\n()")
  local status = head and tonumber(head:match("^HTTP/%d%.%d (%d%d%d)"))
  if not status then return nil end
  local headers = {}
  for name, value in head:gmatch("\r\n([^:\r]+): ?([^\r]*)") do
    headers[#headers + 1] = { name:lower(), value }
  end
  return status, headers, answer:sub(finish)
end

-- A connection to the service. While it is gone and HAProxy knows no server either, as when both
-- start, the request waits.
local function connected()
  for _ = 1, START_TRIES do
    local socket = core.tcp()
    socket:settimeout(PATIENCE_S)
    if socket:connect(SERVICE) then return socket end
    socket:close()
    if core.backends["fallback"]:get_srv_act() > 0 then return nil end
    core.msleep(START_PAUSE_MS)
  end
  return nil
end

local function ask(txn)
  local socket = connected()
  if not socket then return nil end
  local answer = nil
  if socket:send(question(txn, txn.sf:req_body() or "")) then
    answer = socket:receive("*a")
  end
  socket:close()
  return parsed(answer)
end

core.register_action("decide", { "http-req" }, function(txn)
  local status, headers, body = ask(txn)
  if not status then
    txn:set_var("txn.slo_fallback", true)
    return
  end
  local slot = nil
  local set = {}
  for _, header in ipairs(headers) do
    if header[1] == OWN .. "slot" then
      slot = header[2]
    elseif header[1]:sub(1, #OWN + 4) == OWN .. "set-" then
      set[#set + 1] = { header[1]:sub(#OWN + 5), header[2] }
    elseif header[1] == OWN .. "replica" then
      txn:set_var("txn.slo_replica", header[2])
    elseif header[1] == OWN .. "last" then
      txn:set_var("txn.slo_last", true)
    end
  end
  if slot then
    for _, header in ipairs(set) do
      txn.http:req_set_header(header[1], header[2])
    end
    txn.http:req_set_header(OWN .. "tries", tostring(txn:get_var("txn.slo_tries") or 0))
    txn:set_var("txn.slo_slot", slot)
    return
  end
  local reply = txn:reply({ status = status })
  for _, header in ipairs(headers) do
    local name = header[1]
    if name ~= "connection" and name ~= "content-length" and name ~= "transfer-encoding" then
      reply:add_header(name, header[2])
    end
  end
  reply:set_body(body)
  txn:done(reply)
end, 0)
