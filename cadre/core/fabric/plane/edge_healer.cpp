#include "cadre/core/fabric/plane/edge_healer.h"

#include <algorithm>
#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/core/fabric/plane/topology.h"

namespace cadre {
namespace {

std::vector<os::Listener*> pointers_to(const std::vector<std::unique_ptr<os::Listener>>& owners) {
  std::vector<os::Listener*> listeners;
  for (const auto& listener : owners) listeners.push_back(listener.get());
  return listeners;
}

}  // namespace

EdgeHealer::EdgeHealer(os::System& system, Setup setup)
    : system_(system),
      setup_(std::move(setup)),
      self_(setup_.plan.identity.rank.value),
      callers_(system, setup_.plan.identity, pointers_to(setup_.listeners),
               static_cast<size_t>(setup_.plan.layout.num_ranks())),
      dialer_(system, setup_.plan, setup_.silence_limit, setup_.wake_up, setup_.log),
      plan_at_(system.now()) {}

void EdgeHealer::note_loss() {
  if (is_leaving_) return;
  const TimePoint at = system_.now() + kLossPause;
  plan_at_ = std::min(plan_at_.value_or(at), at);
}

void EdgeHealer::note_leave() {
  if (!plan_at_ && !is_leaving_) plan_at_ = system_.now() + kLeavePause;
}

void EdgeHealer::suspect(int rank) {
  suspects_.try_emplace(rank, system_.now() + kLeaveNewsTime);
}

EdgeHealer::Findings EdgeHealer::advance(const View& view, bool is_ready) {
  Findings findings;
  if (has_stopped_) return findings;
  const TimePoint now = system_.now();
  const bool is_due = plan_at_ && now >= *plan_at_;
  const bool is_always_due = is_leaving_ && !plan_at_ && view.may_dial;
  if (is_due || is_always_due) plan_edges(view);
  if (is_leaving_ && !view.may_dial) dialer_.stop();
  if (!is_leaving_ || !plan_at_) dial_missing(view);
  const Deadline never(now + Duration::max());
  if (is_ready || callers_.next_deadline(never).has_passed(now)) take_calls(findings);
  take_dials(findings);
  judge_suspects(view, findings);
  return findings;
}

void EdgeHealer::plan_edges(const View& view) {
  plan_at_.reset();
  const std::vector<int> wanted = neighbours(setup_.plan.layout, view.is_present, self_);
  for (const int peer : wanted_) {
    if (!std::ranges::binary_search(wanted, peer)) dialer_.drop(peer);
  }
  wanted_ = wanted;
  std::erase_if(missing_, [&](const auto& missing) {
    return !std::ranges::binary_search(wanted, missing.first);
  });
}

void EdgeHealer::dial_missing(const View& view) {
  const TimePoint now = system_.now();
  for (const int peer : wanted_) {
    if (view.has_link(peer) || !view.is_present[static_cast<size_t>(peer)] || !view.may_dial) {
      missing_.erase(peer);
      continue;
    }
    const TimePoint since = missing_.try_emplace(peer, now).first->second;
    const bool is_due = is_leaving_ || peer < self_ || now - since >= kCallTime;
    if (!is_due || !is_open(peer)) continue;
    if (is_leaving_ && num_leaving_dials_++ >= kMaxLeavingDials) return;
    ++setup_.meter.dials;
    dialer_.dial(peer);
  }
}

void EdgeHealer::take_calls(Findings& findings) {
  for (Handshake& handshake : callers_.advance()) {
    const int peer = handshake.hello().from;
    const wire::LinkPurpose purpose = handshake.hello().purpose;
    // If the process that connected names a rank outside the job, it is at fault, and its
    // connection is closed.
    if (peer < 0 || peer >= setup_.plan.layout.num_ranks() || peer == self_) continue;
    if (purpose == wire::LinkPurpose::kControl) {
      findings.connections.push_back({peer, Dialer::Ending::kConnected, handshake.take()});
    } else if (setup_.on_data_connection) {
      setup_.on_data_connection(peer, handshake.take());
    }
  }
}

void EdgeHealer::take_dials(Findings& findings) {
  for (Dialer::Outcome& outcome : dialer_.advance()) {
    switch (outcome.ending) {
      case Dialer::Ending::kConnected:
        findings.connections.push_back(std::move(outcome));
        break;
      case Dialer::Ending::kRefused:
        suspect(outcome.peer);
        break;
      case Dialer::Ending::kUnanswered:
        findings.verdicts.push_back({outcome.peer, SignOfLoss::kUnreachable, true});
        break;
      case Dialer::Ending::kSilent:
        findings.verdicts.push_back({outcome.peer, SignOfLoss::kSilence, false});
        break;
    }
  }
}

void EdgeHealer::judge_suspects(const View& view, Findings& findings) {
  const TimePoint now = system_.now();
  std::erase_if(suspects_, [&](const auto& suspect) {
    const auto& [rank, until] = suspect;
    const bool is_cleared = !view.is_present[static_cast<size_t>(rank)] || view.has_link(rank);
    if (!is_cleared && (now < until || is_leaving_)) return false;
    if (!is_cleared) findings.verdicts.push_back({rank, SignOfLoss::kUnreachable, false});
    return true;
  });
}

void EdgeHealer::add_interests(std::vector<os::PollItem>& items) const {
  if (has_stopped_) return;
  callers_.add_interests(items);
  dialer_.add_interests(items);
}

Deadline EdgeHealer::next_deadline(Deadline deadline) const {
  if (has_stopped_) return deadline;
  deadline = dialer_.next_deadline(callers_.next_deadline(deadline));
  if (plan_at_) deadline = deadline.earlier(Deadline(*plan_at_));
  if (is_leaving_) return deadline;
  for (const auto& [rank, until] : suspects_) deadline = deadline.earlier(Deadline(until));
  for (const auto& [peer, since] : missing_) {
    if (is_open(peer)) deadline = deadline.earlier(Deadline(since + kCallTime));
  }
  return deadline;
}

void EdgeHealer::start_leaving() {
  is_leaving_ = true;
  plan_at_ = system_.now() + kLeavingPause;
}

bool EdgeHealer::is_complete(const View& view) const {
  return !plan_at_ && std::ranges::all_of(wanted_, [&](int peer) {
    const bool is_given_up = num_leaving_dials_ > kMaxLeavingDials && !dialer_.is_dialing(peer);
    return view.has_link(peer) || !view.is_present[static_cast<size_t>(peer)] ||
           suspects_.contains(peer) || is_given_up;
  });
}

void EdgeHealer::stop() {
  has_stopped_ = true;
  callers_.stop_accepting();
  dialer_.stop();
}

}  // namespace cadre
