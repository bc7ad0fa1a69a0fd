// The messages between agents. Each carries the sender's epoch and round, so that a receiver can
// recognise an old message.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cadre/core/base/deadline.h"
#include "cadre/launch/agent/table.h"

namespace cadre::launch {

// What became of an agent's workers of one round.
enum class Outcome : uint8_t { kNone, kSucceeded, kFailed, kStopped };

enum class MessageKind : uint8_t {
  kJoin,       // agent to coordinator: host, table, and the state of the agent's workers
  kTable,      // coordinator to agent; also the answer of an agent that is not the coordinator
  kConfirm,    // agent to coordinator: it has the table of the round that is being started
  kBeat,       // agent to coordinator
  kBeatReply,  // coordinator to agent, with the time of the beat
  kReport,     // agent to coordinator: the state of its workers
  kLeave,      // agent to coordinator
};

struct Message {
  MessageKind kind = MessageKind::kBeat;
  uint64_t epoch = 0;
  uint64_t round = 0;  // kJoin and kReport: the round of the agent's last workers
  TimePoint time;      // kBeat, kBeatReply: when the agent sent the beat, by its clock
  bool has_workers = false;
  Outcome outcome = Outcome::kNone;
  std::string reason;
  Host host;
  // Shared, because a coordinator sends the same table to all agents.
  std::shared_ptr<const Table> table;
};

}  // namespace cadre::launch
