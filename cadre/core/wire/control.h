// Messages between ranks: their addresses, which they publish in the store, the handshake of every
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

class ByteReader;

inline constexpr size_t kMaxControlFrameBytes = 16 << 10;
// The size of the length prefix of a frame.
inline constexpr size_t kControlPrefixBytes = sizeof(uint32_t);
inline constexpr size_t kMaxControlTextBytes = 4 << 10;
inline constexpr size_t kMaxPhaseBytes = 64;  // the largest size of Activity::phase
inline constexpr size_t kMaxElsewhereBytes = 160;
// The largest number of activities in a LossReport.
inline constexpr size_t kMaxLastActivities = 32;
inline constexpr size_t kMaxEventsInBatch = 4096;

// The version of the handshake, the first field of a Hello. Builds before the first version send
// the purpose of the connection at this offset. Its values are all below 4, so they are rejected as
// a wrong version, too.
inline constexpr uint8_t kHandshakeVersion = 6;

using Nonce = std::array<std::byte, 32>;
using Proof = std::array<std::byte, 32>;  // an HMAC-SHA256 whose key is the job's token

// The identity and addresses of a rank, which it publishes in the store.
struct RankAddress {
  std::string version;  // the version of the library, which must be equal on all ranks
  std::string host;
  std::string boot_id;
  int32_t pid = 0;
  std::string tcp_address;
  std::string unix_address;
  // A random number, which this rank also writes into shared memory: a rank that reads the same
  // number from a segment has mapped the segment of this rank.
  uint64_t probe = 0;
  std::string core_mask;       // the cores on which the rank may run, as in os::HostInfo
  uint64_t pid_namespace = 0;  // the PID namespace of `pid`; 0 if unknown
  // The type of the device on whose memory the rank works beside memory of the CPU; kCpu if none.
  DeviceType device = DeviceType::kCpu;

  friend bool operator==(const RankAddress&, const RankAddress&) = default;
};

// kAgent connects the launchers of two hosts of a job. They have no ranks: `from` and `to` are 0.
enum class LinkPurpose : uint8_t { kControl, kData, kAgent };
inline constexpr int kNumLinkPurposes = 3;

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

// The second message of a handshake: the nonce of the rank that accepts. It does not depend on the
// token, because the peer has not proved yet that it is a rank.
struct Challenge {
  Nonce nonce{};

  friend bool operator==(const Challenge&, const Challenge&) = default;
};

// The third message of a handshake: the proof of the rank that connects.
struct Answer {
  Proof proof{};

  friend bool operator==(const Answer&, const Answer&) = default;
};

// Sent instead of the next handshake message: the reason why the connection is rejected. The sender
// then closes the connection.
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
  // The operation. Its kind says whether `number` counts collectives or messages (send and recv).
  Fingerprint fingerprint = {};
  int32_t waiting_for = -1;
  int64_t age_ns = 0;  // the time since the operation began (if it is running) or ended
  std::string phase;
  // If the rank is idle in this group, this is the operation that it runs in another group, for
  // example 'all_reduce #7 of group "tp"'. At most kMaxElsewhereBytes are sent.
  std::string elsewhere = {};

  friend bool operator==(const Activity&, const Activity&) = default;
};

// Returns whether the rank is in an operation: one that is running, or one that has failed.
inline bool is_in_operation(const Activity& activity) {
  return activity.state == ActivityState::kRunning || activity.state == ActivityState::kFailed;
}

// The failure of a group. `culprit` is the rank at fault, and `reporter` the rank that detected the
// first failure; each is -1 if unknown.
struct AbortNotice {
  ErrorCode code = ErrorCode::kAborted;
  int32_t culprit = -1;
  int32_t reporter = -1;
  std::string cause;  // the sentence that explains the failure; equal on all ranks
  // The error text of the first failure on the rank that detected it, without the remedy.
  std::string message;
  // The remedy for the cause; if empty, the remedy of the error code is used.
  std::string remedy = {};

  friend bool operator==(const AbortNotice&, const AbortNotice&) = default;
};

// The last message of a handshake: the proof of the rank that accepts.
struct Acceptance {
  Proof proof{};

  friend bool operator==(const Acceptance&, const Acceptance&) = default;
};

// The evidence that a rank is lost.
enum class SignOfLoss : uint8_t {
  kConnectionEnded,
  kProcessEnded,
  kSilence,
  kUnreachable,
  kNamedByLauncher,
};
inline constexpr int kNumSignsOfLoss = 5;

// The operation that a rank runs in one group, or the last one that it ran in that group.
struct GroupActivity {
  uint64_t group = 0;
  Activity activity;

  friend bool operator==(const GroupActivity&, const GroupActivity&) = default;
};

// Says that a rank of the fabric (the connected ranks of the job) is lost.
struct LossReport {
  int32_t rank = -1;
  int32_t reporter = -1;  // the rank that detected the loss
  SignOfLoss sign = SignOfLoss::kConnectionEnded;
  // The last operations of the lost rank, one for each group, if the reporter could read them from
  // shared memory.
  std::vector<GroupActivity> last;

  friend bool operator==(const LossReport&, const LossReport&) = default;
};

// Says that a rank has left the fabric without a failure.
struct FabricLeave {
  int32_t rank = -1;

  friend bool operator==(const FabricLeave&, const FabricLeave&) = default;
};

// Says that a rank has left a group without a failure.
struct GroupLeave {
  uint64_t group = 0;
  int32_t rank = -1;
  uint64_t num_collectives = 0;
  Fingerprint last = {};  // the fingerprint of the last collective; zero if there was none

  friend bool operator==(const GroupLeave&, const GroupLeave&) = default;
};

// The first failure of a group; `origin` is the rank that published it. All rank numbers are those
// of the fabric.
struct GroupFailure {
  uint64_t group = 0;
  int32_t origin = -1;
  AbortNotice notice;

  friend bool operator==(const GroupFailure&, const GroupFailure&) = default;
};

// The question of rank `origin` to all members of a group: which operation do they run?
struct StatusQuestion {
  int32_t origin = -1;
  uint64_t number = 0;  // the number of the question among those of the rank that asks
  uint64_t group = 0;

  friend bool operator==(const StatusQuestion&, const StatusQuestion&) = default;
};

// The answer of rank `rank` to a question: the operation that it runs in that group.
struct StatusAnswer {
  int32_t origin = -1;  // the rank that asked; with `number` it identifies the question
  uint64_t number = 0;
  int32_t rank = -1;
  Activity activity;

  friend bool operator==(const StatusAnswer&, const StatusAnswer&) = default;
};

// The events that ranks forward to each other.
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
// Fails the reader for a byte that is no type of device.
DeviceType read_device_type(ByteReader& in);

// Returns the message as a frame: a 32-bit length, the type, the fields. Texts that are too long
// are truncated. REQUIRES: an EventBatch fits into a frame; encode_events() ensures that.
std::vector<std::byte> encode_control(const ControlMessage& message);
// Returns the events as EventBatches in as many frames as are needed.
std::vector<std::byte> encode_events(std::span<const Event> events);
// Decodes a frame; `body` has all but its length prefix.
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
