// The messages between agents. Each carries the sender's epoch and round, so that a receiver can
// recognise an old message.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/base/types.h"
#include "cadre/launch/agent/table.h"

namespace cadre::launch {

// What became of an agent's workers of one round.
enum class Outcome : uint8_t {
  kNone,
  kSucceeded,
  kFailed,
  kStopped,
  kFailedForGood,  // a restart would only repeat the failure, for example a wrong configuration
};
inline constexpr uint8_t kNumOutcomes = 5;
inline bool is_failure(Outcome outcome) {
  return outcome == Outcome::kFailed || outcome == Outcome::kFailedForGood;
}

enum class MessageKind : uint8_t {
  kJoin,       // agent to coordinator: host, table, and the state of the agent's workers
  kTable,      // coordinator to agent; also the answer of an agent that is not the coordinator
  kConfirm,    // agent to coordinator: it has the table of the round that is being started
  kBeat,       // agent to coordinator
  kBeatReply,  // coordinator to agent, with the time of the beat
  kReport,     // agent to coordinator: the state of its workers
  kLeave,      // agent to coordinator
};
inline constexpr uint8_t kNumMessageKinds = 7;

struct Message {
  MessageKind kind = MessageKind::kBeat;
  uint64_t epoch = 0;
  uint64_t round = 0;  // kJoin and kReport: the round of the agent's last workers
  // kBeat, kJoin: when the agent sent it, by its clock. The answer has the same time.
  TimePoint time;
  bool has_workers = false;
  Outcome outcome = Outcome::kNone;
  std::string reason;
  Host host;
  // kTable of a coordinator: the port of the round's store on the coordinator's host; 0 without a
  // round.
  uint16_t store_port = 0;
  // Shared, because a coordinator sends the same table to all agents. A kJoin and a kTable have it.
  std::shared_ptr<const Table> table;
};

// The encoding of a message. Format: docs/formats/agent-messages.md. Errors: kCorruption for bytes
// that are not one whole message. All input counts as untrusted.
std::vector<std::byte> encode(const Message& message);
Result<Message> decode_message(ConstBytes bytes);

}  // namespace cadre::launch
