#include "cadre/comm/bootstrap/watch.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <variant>

#include "cadre/base/format.h"
#include "cadre/rendezvous/lost_rank.h"
#include "cadre/rendezvous/presence.h"
#include "cadre/wire/byte_codec.h"
#include "cadre/wire/control.h"

namespace cadre {
namespace {

constexpr Duration kFirstPause = std::chrono::milliseconds(50);
constexpr Duration kLongestPause = std::chrono::milliseconds(500);
constexpr Duration kStoreTime = std::chrono::seconds(1);

}  // namespace

BootstrapWatch::BootstrapWatch(os::System& system, const Membership& membership,
                               const std::string& prefix)
    : system_(system),
      membership_(membership),
      trouble_key_(prefix + "trouble"),
      lost_key_(lost_key(membership.round)),
      pause_(kFirstPause) {}

Deadline BootstrapWatch::next_look() {
  const Deadline next = system_.deadline_in(pause_);
  pause_ = std::min(2 * pause_, kLongestPause);
  return next;
}

Result<bool> BootstrapWatch::poll(std::span<os::PollItem> items, Deadline deadline) {
  while (true) {
    if (system_.poll(items, deadline.earlier(next_look()))) return true;
    if (deadline.has_passed(system_.now())) return false;
    CADRE_RETURN_IF_ERROR(look());
  }
}

Result<std::vector<std::string>> BootstrapWatch::multi_get(std::span<const std::string> keys,
                                                           Deadline deadline) {
  while (true) {
    auto values = membership_.store->multi_get(keys, deadline.earlier(next_look()));
    const bool is_late = deadline.has_passed(system_.now());
    if (values.ok() || is_late || values.error().code() != ErrorCode::kTimeout) return values;
    CADRE_RETURN_IF_ERROR(look());
  }
}

Status BootstrapWatch::look() {
  const Deadline deadline = system_.deadline_in(kStoreTime);
  Status status = look_for_report(deadline);
  if (status.ok()) status = look_for_lost(deadline);
  if (!status.ok()) was_told_ = true;
  return status;
}

Status BootstrapWatch::look_for_report(Deadline deadline) {
  const auto is_there = membership_.store->check(std::span(&trouble_key_, 1), deadline);
  if (!is_there.ok()) return is_there.error();
  if (!*is_there) return {};
  const auto report = membership_.store->get(trouble_key_, deadline);
  if (!report.ok()) return report.error();
  const auto message = wire::decode_control(wire::as_bytes(*report));
  const auto* notice = message.ok() ? std::get_if<wire::AbortNotice>(&message.value()) : nullptr;
  if (notice == nullptr) {
    return Error(ErrorCode::kCorruption, format("store key \"{}\" holds no report", trouble_key_));
  }
  ErrorDetails details;
  if (notice->culprit >= 0) details.culprit = notice->culprit;
  if (notice->reporter >= 0) details.reporter = notice->reporter;
  return Error(notice->code, notice->message).with_details(std::move(details));
}

Status BootstrapWatch::look_for_lost(Deadline deadline) {
  const auto is_there = membership_.store->check(std::span(&lost_key_, 1), deadline);
  if (!is_there.ok()) return is_there.error();
  if (!*is_there) return {};
  const auto text = membership_.store->get(lost_key_, deadline);
  if (!text.ok()) return text.error();
  for (const LostRank& lost : read_lost_ranks(*text)) {
    const auto sentence = [&](int rank) {
      return Error(ErrorCode::kPeerLost,
                   format("rank {} ({}, pid {}) ended before the group was connected: look at its "
                          "log, and start it anew",
                          rank, lost.host, lost.pid))
          .with_culprit(rank);
    };
    // Until the cards are known only the group of all ranks knows that it is one of its own.
    if (membership_.world_size == membership_.job_size) return sentence(lost.rank);
    for (size_t rank = 0; rank < cards_.size(); ++rank) {
      if (cards_[rank].pid == lost.pid && cards_[rank].host == lost.host) {
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
  // The first report stays; whether it arrived changes nothing for this rank.
  (void)membership_.store->compare_set(
      trouble_key_, "", wire::as_text(ConstBytes(frame).subspan(wire::kControlPrefixBytes)),
      system_.deadline_in(kStoreTime));
}

}  // namespace cadre
