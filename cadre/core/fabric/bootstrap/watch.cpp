#include "cadre/core/fabric/bootstrap/watch.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <variant>

#include "cadre/core/base/format.h"
#include "cadre/core/rendezvous/lost_rank.h"
#include "cadre/core/wire/byte_codec.h"
#include "cadre/core/wire/control.h"

namespace cadre {
namespace {

constexpr Duration kFirstPause = std::chrono::milliseconds(50);
constexpr Duration kLongestPause = std::chrono::milliseconds(500);
constexpr Duration kLongestStoreTime = std::chrono::seconds(16);

}  // namespace

BootstrapWatch::BootstrapWatch(os::System& system, const Membership& membership,
                               const std::string& prefix)
    : system_(system),
      membership_(membership),
      trouble_key_(prefix + "trouble"),
      lost_key_(lost_key(membership.round, membership.will_group)),
      pause_(kFirstPause),
      store_time_(kStoreTime) {}

Deadline BootstrapWatch::next_look() {
  const Deadline next = system_.deadline_in(pause_);
  pause_ = std::min(2 * pause_, kLongestPause);
  return next;
}

Result<bool> BootstrapWatch::poll(std::span<os::PollItem> items, Deadline deadline) {
  while (true) {
    if (deadline.has_passed(system_.now())) return false;
    if (!look_at_) look_at_ = next_look();
    if (look_at_->has_passed(system_.now())) {
      CADRE_RETURN_IF_ERROR(look(deadline));
      look_at_ = next_look();
    }
    if (system_.poll(items, deadline.earlier(*look_at_))) return true;
  }
}

Result<std::vector<std::string>> BootstrapWatch::multi_get(std::span<const std::string> keys,
                                                           Deadline deadline) {
  while (true) {
    Deadline patience = next_look();
    // The store has answered too slowly before, so this call gets a longer time limit.
    if (store_time_ > kStoreTime) patience = system_.deadline_in(store_time_);
    const Status there = membership_.store->wait(keys, deadline.earlier(patience));
    // Reading the values may take long, so this call may use all the time that is left.
    if (there.ok()) return membership_.store->multi_get(keys, deadline);
    const bool is_late = deadline.has_passed(system_.now());
    if (is_late || there.error().code() != ErrorCode::kTimeout) return there.error();
    CADRE_RETURN_IF_ERROR(look(deadline));
  }
}

Status BootstrapWatch::look(Deadline deadline) {
  Status status = look_for_report(deadline);
  if (status.ok()) status = look_for_lost(deadline);
  if (!status.ok()) was_told_ = true;
  return status;
}

Status BootstrapWatch::await_report(Duration patience) {
  const Deadline deadline = system_.deadline_in(patience);
  const std::unique_ptr<os::Waiter> waiter = system_.make_waiter();
  for (Duration pause = kFirstPause / 2;; pause *= 2) {
    CADRE_RETURN_IF_ERROR(look(system_.deadline_in(kStoreTime)));
    if (deadline.has_passed(system_.now())) return {};
    waiter->park(deadline.earlier(system_.deadline_in(pause)));
  }
}

Result<std::optional<std::string>> BootstrapWatch::read(const std::string& key, Deadline deadline) {
  const Deadline patience = deadline.earlier(system_.deadline_in(store_time_));
  const auto is_there = membership_.store->check(std::span(&key, 1), patience);
  if (is_there.ok() && !*is_there) return std::optional<std::string>();
  auto value =
      is_there.ok() ? membership_.store->get(key, patience) : Result<std::string>(is_there.error());
  if (value.ok()) return std::optional(std::move(value).value());
  if (value.error().code() != ErrorCode::kTimeout) return value.error();
  store_time_ = std::min(2 * store_time_, kLongestStoreTime);
  return std::optional<std::string>();
}

Status BootstrapWatch::look_for_report(Deadline deadline) {
  const auto report = read(trouble_key_, deadline);
  if (!report.ok()) return report.error();
  if (!*report) return {};
  const auto message = wire::decode_control(wire::as_bytes(**report));
  const auto* notice = message.ok() ? std::get_if<wire::AbortNotice>(&message.value()) : nullptr;
  if (notice == nullptr) {
    return Error(ErrorCode::kCorruption,
                 format("store key \"{}\" has a value that is no error report of a rank; check "
                        "that no other program writes this key",
                        trouble_key_));
  }
  ErrorDetails details;
  if (notice->culprit >= 0) details.culprit = notice->culprit;
  if (notice->reporter >= 0) details.reporter = notice->reporter;
  return Error(notice->code, notice->message).with_details(std::move(details));
}

Status BootstrapWatch::look_for_lost(Deadline deadline) {
  const auto text = read(lost_key_, deadline);
  if (!text.ok()) return text.error();
  if (!*text) return {};
  for (const LostRank& lost : read_lost_ranks(**text)) {
    const auto sentence = [&](int rank) {
      return Error(ErrorCode::kPeerLost,
                   format("rank {} ({}, pid {}) ended before the group was connected: look at its "
                          "log, and start it anew",
                          rank, lost.host, lost.pid))
          .with_culprit(rank);
    };
    // The number of a lost rank is its rank in the job. If this group has all ranks of the job,
    // that is also its rank in the group. Other groups find the rank by its host and pid, once the
    // addresses are known.
    if (membership_.world_size == membership_.job_size) return sentence(lost.rank);
    for (size_t rank = 0; rank < rank_addresses_.size(); ++rank) {
      if (rank_addresses_[rank].pid == lost.pid && rank_addresses_[rank].host == lost.host) {
        return sentence(static_cast<int>(rank));
      }
    }
  }
  return {};
}

void BootstrapWatch::report(const Error& error) {
  if (was_told_) return;
  const ErrorDetails& details = error.details();
  const std::vector<std::byte> frame = wire::encode_control(wire::AbortNotice{
      error.code(), details.culprit.value_or(-1).value,
      details.reporter.value_or(membership_.rank).value, "",
      format("rank {} could not connect: {}", membership_.rank, error.message())});
  // The store keeps only the first report, and this rank fails whether or not its report is stored,
  // so the result is ignored.
  (void)membership_.store->compare_set(
      trouble_key_, "", wire::as_text(ConstBytes(frame).subspan(wire::kControlPrefixBytes)),
      system_.deadline_in(kStoreTime));
}

}  // namespace cadre
