// The messages by which ranks identify each other: addresses in the store, the handshake of every
// connection, and the events on control connections.
//
// Threads: plain values; a ControlSplitter has one owner. Blocking: never.
// Errors: kCorruption for bytes that are not such a message; all input counts as untrusted.
// Format: docs/formats/control-messages.md.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fingerprint.h"
#include "cadre/core/base/types.h"

namespace cadre::wire {

inline constexpr size_t kMaxControlFrameBytes = 16 << 10;
// The size of the length that precedes a frame.
inline constexpr size_t kControlPrefixBytes = sizeof(uint32_t);
inline constexpr size_t kMaxControlTextBytes = 4 << 10;
inline constexpr size_t kMaxPhaseBytes = 64;  // the largest size of Activity::phase
inline constexpr size_t kMaxElsewhereBytes = 160;
// The largest number of activities in the report of a loss.
inline constexpr size_t kMaxLastActivities = 32;
inline constexpr size_t kMaxEventsInBatch = 4096;

// The version of the messages by which two ranks open a connection. A build from before this
// version has the link's purpose at this offset, whose values are all below 4, so a peer with such
// a build is rejected, too.
inline constexpr uint8_t kHandshakeVersion = 6;

using Nonce = std::array<std::byte, 32>;
using Proof = std::array<std::byte, 32>;  // is an HMAC-SHA256 whose key is the job's token

// The identity and addresses of a rank; published in the store under a key of the round.
struct RankAddress {
  std::string version;  // the version of the library, which must be equal on all ranks
  std::string host;
  std::string boot_id;
  int32_t pid = 0;
  std::string tcp_address;
  std::string unix_address;
  uint64_t probe = 0;     // is a random number; a rank that reads it has mapped this rank's segment
  std::string core_mask;  // the cores that the rank may run on, as in os::HostInfo
  uint64_t pid_namespace = 0;  // namespace in which `pid` counts; 0: unknown

  friend bool operator==(const RankAddress&, const RankAddress&) = default;
};

enum class LinkPurpose : uint8_t { kControl, kData };
inline constexpr int kNumLinkPurposes = 2;

// The first message of a connection, which the rank that connects sends. Its first field is
// kHandshakeVersion.
struct Hello {
  LinkPurpose purpose = LinkPurpose::kControl;
  int32_t from = 0;
  int32_t to = 0;
  uint64_t round = 0;
  std::string group;
  std::string version;
  Nonce nonce{};

  friend bool operator==(const Hello&, const Hello&) = default;
};

// The nonce of the accepting rank, to which the other rank answers with a proof. Nothing in it
// depends on the token, because the peer may be a stranger.
struct Challenge {
  Nonce nonce{};

  friend bool operator==(const Challenge&, const Challenge&) = default;
};

// The proof of the rank that connected.
struct Answer {
  Proof proof{};

  friend bool operator==(const Answer&, const Answer&) = default;
};

// Says why a connection was rejected. The connection ends after it.
struct Refusal {
  std::string reason;

  friend bool operator==(const Refusal&, const Refusal&) = default;
};

enum class ActivityState : uint8_t { kNothingYet, kRunning, kDone, kFailed };
inline constexpr int kNumActivityStates = 4;

// The operation that a rank runs, or its last one.
struct Activity {
  ActivityState state = ActivityState::kNothingYet;
  uint64_t number = 0;
  // The kind tells collectives from send and recv, which are counted separately.
  Fingerprint fingerprint = {};
  int32_t waiting_for = -1;
  int64_t age_ns = 0;  // the time since the operation began, if it is running, or since it ended
  std::string phase;
  // What the rank runs in another group, if it is idle in the group of the question, for example
  // 'all_reduce #7 of group "tp"'. At most kMaxElsewhereBytes are sent.
  std::string elsewhere = {};

  friend bool operator==(const Activity&, const Activity&) = default;
};

// Returns whether the rank runs an operation, or is stuck in one that has failed.
inline bool is_in_operation(const Activity& activity) {
  return activity.state == ActivityState::kRunning || activity.state == ActivityState::kFailed;
}

// Says that the sender's group failed. `culprit` is the rank at fault, and `reporter` the rank that
// found the first failure; each is -1 if unknown.
struct AbortNotice {
  ErrorCode code = ErrorCode::kAborted;
  int32_t culprit = -1;
  int32_t reporter = -1;
  std::string cause;    // the sentence that explains the failure, which is equal on all ranks
  std::string message;  // the text of the first failure as its rank throws it, without the remedy
  // The remedy for the cause; if empty, the remedy of the error code is used.
  std::string remedy = {};

  friend bool operator==(const AbortNotice&, const AbortNotice&) = default;
};

// The proof of the accepting rank, sent after the other's proof: the end of the handshake.
struct Acceptance {
  Proof proof{};

  friend bool operator==(const Acceptance&, const Acceptance&) = default;
};

// The evidence that a rank is lost.
enum class SignOfLoss : uint8_t { kConnectionEnded, kProcessEnded, kSilence, kUnreachable };
inline constexpr int kNumSignsOfLoss = 4;

// The operation that a rank runs in a group, or its last one there.
struct GroupActivity {
  uint64_t group = 0;
  Activity activity;

  friend bool operator==(const GroupActivity&, const GroupActivity&) = default;
};

// Says that a rank of the fabric is lost.
struct LossReport {
  int32_t rank = -1;
  int32_t reporter = -1;  // the rank that detected the loss
  SignOfLoss sign = SignOfLoss::kConnectionEnded;
  // The rank's last operations, as far as the reporter could read them.
  std::vector<GroupActivity> last;

  friend bool operator==(const LossReport&, const LossReport&) = default;
};

// Says that a rank left the fabric in good order.
struct FabricLeave {
  int32_t rank = -1;

  friend bool operator==(const FabricLeave&, const FabricLeave&) = default;
};

// Says that a rank left a group in good order.
struct GroupLeave {
  uint64_t group = 0;
  int32_t rank = -1;
  uint64_t num_collectives = 0;
  Fingerprint last = {};  // the fingerprint of the last collective; zero if there was none

  friend bool operator==(const GroupLeave&, const GroupLeave&) = default;
};

// The first failure of a group, which `origin` has published. The ranks in it are those of the
// fabric.
struct GroupFailure {
  uint64_t group = 0;
  int32_t origin = -1;
  AbortNotice notice;

  friend bool operator==(const GroupFailure&, const GroupFailure&) = default;
};

// A question of `origin` to all members of a group about their state.
struct StatusQuestion {
  int32_t origin = -1;
  uint64_t number = 0;  // the number of the question among those of the rank that asks
  uint64_t group = 0;

  friend bool operator==(const StatusQuestion&, const StatusQuestion&) = default;
};

// What `rank` runs in the group of a question.
struct StatusAnswer {
  int32_t origin = -1;  // the rank that asks; together with `number` it identifies the question
  uint64_t number = 0;
  int32_t rank = -1;
  Activity activity;

  friend bool operator==(const StatusAnswer&, const StatusAnswer&) = default;
};

// Events, which ranks forward to each other.
using Event =
    std::variant<LossReport, FabricLeave, GroupLeave, GroupFailure, StatusQuestion, StatusAnswer>;

struct EventBatch {
  std::vector<Event> events;

  friend bool operator==(const EventBatch&, const EventBatch&) = default;
};

// Says that the sender is alive and has no event to send.
struct Heartbeat {
  friend bool operator==(const Heartbeat&, const Heartbeat&) = default;
};

// Acknowledges a FabricLeave to the rank that leaves.
struct LeaveReceipt {
  friend bool operator==(const LeaveReceipt&, const LeaveReceipt&) = default;
};

using ControlMessage = std::variant<Hello, Challenge, Answer, Refusal, AbortNotice, Acceptance,
                                    EventBatch, Heartbeat, LeaveReceipt>;

std::string encode_rank_address(const RankAddress& rank_address);
Result<RankAddress> decode_rank_address(std::string_view text);

// Returns the message as a frame: a 32-bit length, the type, the fields. Texts that are too long
// are cut. REQUIRES: an EventBatch fits into a frame; encode_events() ensures that.
std::vector<std::byte> encode_control(const ControlMessage& message);
// Returns as many frames of EventBatches as are needed.
std::vector<std::byte> encode_events(std::span<const Event> events);
// Decodes a frame without its length.
Result<ControlMessage> decode_control(ConstBytes body);

// Splits a stream into messages.
class ControlSplitter {
 public:
  void append(ConstBytes received);
  // Returns the next whole message; nullopt if more bytes are needed. After an error the stream is
  // unusable.
  Result<std::optional<ControlMessage>> next();

 private:
  std::vector<std::byte> buffer_;
};

}  // namespace cadre::wire
