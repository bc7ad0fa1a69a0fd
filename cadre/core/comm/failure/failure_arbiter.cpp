#include "cadre/core/comm/failure/failure_arbiter.h"

namespace cadre {

using wire::Activity;
using wire::ActivityState;

bool FailureArbiter::claim() {
  if (phase_ != Phase::kNone) return false;
  phase_ = Phase::kClaimed;
  return true;
}

bool FailureArbiter::report(const Failure& failure, TimePoint now) {
  if (claim()) return true;
  if (phase_ == Phase::kClaimed && !report_) report_ = Report{failure, now};
  return false;
}

void FailureArbiter::conclude(Finding finding, TimePoint now) {
  finding_ = std::move(finding);
  concluded_at_ = now;
}

// The patience of a finding begins when its investigation ends, so a report that arrives during the
// investigation always counts.
bool FailureArbiter::is_decided(TimePoint now) const {
  if (!finding_) return false;
  const bool is_certain = finding_->patience <= Duration(0);
  return is_certain || report_ || now >= concluded_at_ + finding_->patience;
}

const Failure& FailureArbiter::decided() const {
  const bool is_replaced = report_ && finding_->patience > Duration(0) &&
                           report_->at <= concluded_at_ + finding_->patience;
  return is_replaced ? report_->failure : finding_->failure;
}

ExplainedFailure FailureArbiter::explain(const Failure& failure, const Activity& own) const {
  Failure attributed = failure;
  if (!failure.operation && own.state == ActivityState::kRunning) attributed.operation = own;
  // Only the attribution to a collective may change. Messages are numbered separately from
  // collectives, and a later message does not show whether the attributed message has succeeded.
  const bool is_open = !failure.operation && attributed.operation && !is_message(own.fingerprint);
  const Failure& lasting = is_open ? failure : attributed;
  return {attributed, is_open, compose_error(roster_, attributed, own, record_path_),
          compose_error(roster_, lasting, own, record_path_),
          compose_sentence(roster_, lasting, own)};
}

void FailureArbiter::publish(ExplainedFailure explained) {
  if (published_) return;
  published_ = std::move(explained);
  phase_ = Phase::kPublished;
}

const Error& FailureArbiter::error(const Activity& last) {
  if (!published_) return not_failed_;
  const bool has_ended =
      published_->is_attribution_open &&
      (last.number != published_->failure.operation->number || last.state == ActivityState::kDone);
  if (has_ended) {
    published_->is_attribution_open = false;
    published_->failure.operation.reset();
    if (last.state == ActivityState::kRunning) published_->failure.operation = last;
    published_->error = compose_error(roster_, published_->failure, last, record_path_);
  }
  return published_->error;
}

}  // namespace cadre
