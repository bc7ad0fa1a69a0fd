#include "cadre/core/comm/recovery/recovery.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>

#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/files/file.h"
#include "cadre/core/rendezvous/job_environment.h"
#include "cadre/core/wire/recovery/recovery_files.h"

namespace cadre {
namespace {

// How often a rank that waits looks for the launcher's file.
constexpr Duration kLookInterval = std::chrono::milliseconds(10);

std::string file_for_launcher() {
  const char* const path = std::getenv(kRecoveryVariable);
  return path == nullptr ? "" : path;
}

double seconds(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

RecoveryOptions checked(const RecoveryOptions& options) {
  if (options.comes_within >= std::chrono::milliseconds(1)) return options;
  throw Error(ErrorCode::kInvalidArgument,
              format("Recovery: comes_within is {:g} s, expected a millisecond at least",
                     seconds(options.comes_within)));
}

// What the ranks compare before a state is copied.
struct StateDigest {
  int64_t has_state = 0;
  int64_t step = 0;
  int64_t num_parts = 0;
  int64_t sizes = 0;  // a hash of the sizes of the parts
};

std::vector<StateDigest> gather_digests(Communicator& group, const StateDigest& own) {
  std::vector<StateDigest> all(static_cast<size_t>(group.world_size()));
  group.all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)),
                   DType::kInt64);
  return all;
}

std::optional<NewestState> newest_of(const std::vector<StateDigest>& digests) {
  std::optional<NewestState> newest;
  for (size_t rank = 0; rank < digests.size(); ++rank) {
    const StateDigest& digest = digests[rank];
    if (digest.has_state == 0 || (newest && digest.step <= newest->step)) continue;
    newest = NewestState{.rank = static_cast<int>(rank), .step = digest.step};
  }
  return newest;
}

}  // namespace

Recovery::Recovery(os::System& system, const RecoveryOptions& options)
    : system_(system), options_(checked(options)), file_(file_for_launcher()) {
  if (const auto given = read_given_membership()) num_memberships_ = given->number;
  if (is_available()) tell_launcher(false, options_.comes_within).value_or_throw();
}

// If the file cannot be written, the launcher waits for this rank in vain, and then replaces it.
Recovery::~Recovery() {
  if (is_available()) static_cast<void>(tell_launcher(false, Duration{}));
}

Status Recovery::tell_launcher(bool is_waiting, Duration comes_within) {
  const auto within = std::chrono::ceil<std::chrono::milliseconds>(comes_within);
  const std::string text = encode_recovery_file(
      {.is_waiting = is_waiting, .num_memberships = num_memberships_, .comes_within = within});
  const Status written = os::replace_file(file_, std::as_bytes(std::span(text)));
  if (written.ok()) return written;
  return written.error().with_context("Recovery: the launcher does not learn of this rank");
}

bool Recovery::can_recover(const Error& error) const {
  const bool is_of_group = error.code() == ErrorCode::kPeerLost ||
                           error.code() == ErrorCode::kTimeout ||
                           error.code() == ErrorCode::kAborted;
  return is_available() && is_of_group;
}

bool Recovery::has_next_membership() {
  const auto given = read_given_membership();
  if (!given || given->number <= num_memberships_) return false;
  num_memberships_ = given->number;
  return true;
}

JobPosition Recovery::wait_for_membership(Deadline deadline) {
  if (!is_available()) {
    throw Error(ErrorCode::kUnavailable,
                format("Recovery::wait_for_membership: no launcher can give this process a new "
                       "membership ({} is not set); start it with cadre run --max-restarts, or "
                       "let the rank end with the failure",
                       kRecoveryVariable));
  }
  tell_launcher(true, options_.comes_within).value_or_throw();
  const TimePoint began = system_.now();
  bool has_next = has_next_membership();
  while (!has_next && !deadline.has_passed(system_.now())) {
    system_.poll({}, system_.deadline_in(kLookInterval).earlier(deadline));
    has_next = has_next_membership();
  }
  tell_launcher(false, options_.comes_within).value_or_throw();
  // The launcher may have answered before it could read that this rank does not wait any more.
  if (has_next || has_next_membership()) {
    const JobEnvironment environment = read_job_environment().value_or_throw();
    return {.rank = environment.rank,
            .world_size = environment.world_size,
            .restart_count = environment.restart_count};
  }
  throw Error(ErrorCode::kTimeout,
              format("Recovery::wait_for_membership: the launcher has given no new membership for "
                     "{:g} s; either no rank has failed, or other ranks still stop: give more time "
                     "than their comes_within and the launcher's --shutdown-timeout together",
                     seconds(system_.now() - began)));
}

std::optional<NewestState> find_newest_state(Communicator& group, std::optional<int64_t> step) {
  return newest_of(gather_digests(
      group, {.has_state = step ? 1 : 0, .step = step.value_or(0), .num_parts = 0, .sizes = 0}));
}

NewestState broadcast_newest_state(Communicator& group, std::optional<int64_t> step,
                                   std::span<const Bytes> parts) {
  std::string sizes;
  for (const Bytes part : parts) sizes += format("{} ", part.size());
  const StateDigest own{.has_state = step ? 1 : 0,
                        .step = step.value_or(0),
                        .num_parts = static_cast<int64_t>(parts.size()),
                        .sizes = static_cast<int64_t>(fnv1a(sizes))};
  const std::vector<StateDigest> digests = gather_digests(group, own);
  for (size_t rank = 1; rank < digests.size(); ++rank) {
    const StateDigest& first = digests.front();
    const StateDigest& other = digests[rank];
    if (first.num_parts == other.num_parts && first.sizes == other.sizes) continue;
    throw Error(ErrorCode::kInvalidArgument,
                format("broadcast_newest_state: rank 0 passes {} parts and rank {} passes {}, or "
                       "their sizes differ; pass the same buffers on all ranks",
                       first.num_parts, rank, other.num_parts));
  }
  const auto newest = newest_of(digests);
  if (!newest) {
    throw Error(ErrorCode::kInvalidArgument,
                format("broadcast_newest_state: none of the {} ranks has a state; load a snapshot, "
                       "or begin anew (find_newest_state() tells)",
                       group.world_size()));
  }
  for (const Bytes part : parts) {
    if (!part.empty()) group.broadcast(part, DType::kUint8, newest->rank);
  }
  return *newest;
}

}  // namespace cadre
