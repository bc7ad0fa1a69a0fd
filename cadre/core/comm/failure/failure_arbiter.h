// Decides which of several failures becomes the failure of a group, and how this rank reports it. A
// state machine without threads.
//
//   kNone --claim(), or report() of a complete failure--> kClaimed --publish()--> kPublished
//
// One caller claims the failure of the group. It may investigate, which takes time; meanwhile other
// ranks and threads may report failures of their own. If the finding of the investigation is
// uncertain, the first report that arrives before the end of its patience replaces it. The claimant
// then publishes the failure that was decided, and nothing changes it afterwards. One part of the
// published error may still change: a failure that names no operation is attributed to the
// collective that was running when it was published, and that collective may succeed after all.
//
// Threads: one at a time; the Monitor guards the arbiter with its mutex. Blocking: never; time is
// passed in. Errors: none. Ranks are those of the group.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "cadre/core/base/deadline.h"
#include "cadre/core/base/error.h"
#include "cadre/core/comm/failure/diagnosis.h"
#include "cadre/core/wire/control.h"

namespace cadre {

// The result of an investigation.
struct Finding {
  Failure failure;
  // If another rank reports a failure within this time after the investigation, that failure
  // replaces this one, because that rank may have better evidence. Zero if the finding is certain.
  Duration patience{0};
};

// A failure with the texts of this rank about it.
struct ExplainedFailure {
  Failure failure;  // includes the operation to which the failure is attributed
  // The failure named no operation and was attributed to a running collective, which may still
  // succeed.
  bool is_attribution_open = false;
  Error error;           // calls of this rank throw it
  Error logged;          // the log shows it; it names no operation that may still succeed
  std::string sentence;  // other members quote it; it names no operation that may still succeed
};

class FailureArbiter {
 public:
  enum class Phase { kNone, kClaimed, kPublished };

  // `record_path` may be empty.
  FailureArbiter(Roster roster, std::string record_path)
      : roster_(std::move(roster)), record_path_(std::move(record_path)) {}

  Phase phase() const { return phase_; }

  // Claims the failure for an investigation. Returns true for the first caller only, which must
  // conclude() and publish().
  bool claim();
  // Reports a complete failure, of this or another rank. Returns true if it is the first: then the
  // caller must publish it. Otherwise it may replace the finding of the running investigation.
  bool report(const Failure& failure, TimePoint now);
  // Ends the investigation with `finding`. REQUIRES, also for is_decided() and decided(): claim()
  // has returned true to the caller.
  void conclude(Finding finding, TimePoint now);
  // Returns whether no later report can replace the finding: it is certain, was replaced, or its
  // patience has passed.
  bool is_decided(TimePoint now) const;
  // Returns the failure to publish: the finding, or the report that replaced it.
  const Failure& decided() const;

  // Attributes the failure to the operation that this rank runs, if it names none. `own` is the
  // activity of this rank.
  ExplainedFailure explain(const Failure& failure, const wire::Activity& own) const;
  // Publishes the failure. Only the first call has an effect.
  void publish(ExplainedFailure explained);

  // Returns the error that calls throw; kInternal before one is published. `last` is the last
  // collective of this rank: if the failure was attributed to a collective that has succeeded
  // since, the error names the collective that runs now, or none if none is running.
  const Error& error(const wire::Activity& last);

 private:
  struct Report {
    Failure failure;
    TimePoint at;
  };

  const Roster roster_;
  const std::string record_path_;
  Phase phase_ = Phase::kNone;
  std::optional<Report> report_;  // the first report during the investigation
  std::optional<Finding> finding_;
  TimePoint concluded_at_;
  std::optional<ExplainedFailure> published_;
  const Error not_failed_{ErrorCode::kInternal, "the group has not failed"};
};

}  // namespace cadre
