#include "cadre/core/transport/tcp/dial_schedule.h"

#include <algorithm>
#include <chrono>

namespace cadre {
namespace {

// The lower of two ranks waits this long for the higher one to open the connection, so that two
// ranks that begin to wait for each other at the same time do not both open one. If the peer has
// opened a connection, this process waits this long for its first frame before it opens another
// one.
constexpr Duration kPatience = std::chrono::milliseconds(20);
constexpr Duration kFirstDial = std::chrono::milliseconds(250);
constexpr int kMaxDoublings = 3;
// The pauses after a failed attempt to connect; kOptionalRetryPause is for interests with
// ChannelInterest::is_optional.
constexpr Duration kRetryPause = std::chrono::milliseconds(20);
constexpr Duration kOptionalRetryPause = std::chrono::seconds(10);

}  // namespace

DialTurn DialSchedule::plan(const ChannelInterest& interest, bool has_connection, TimePoint now) {
  const bool opens_to_receive = has_lost_opening_ || (is_higher_ && !interest.is_optional);
  const bool is_wanted = interest.want_send || (interest.want_recv && opens_to_receive);
  if (!is_wanted || is_dialing_) return {};
  if (!wanted_since_) wanted_since_ = now;
  TimePoint at = std::max(interest.is_optional ? optional_retry_at_ : retry_at_, now);
  if (!is_higher_ || has_connection) at = std::max(at, *wanted_since_ + kPatience);
  if (at > now) return {DialTurn::Step::kLater, at};
  is_dialing_ = true;
  return {DialTurn::Step::kNow, now, kFirstDial * (1 << std::min(num_late_, kMaxDoublings))};
}

void DialSchedule::end(Ending ending, TimePoint now) {
  is_dialing_ = false;
  retry_at_ = now + kRetryPause;
  optional_retry_at_ = now + kOptionalRetryPause;
  if (ending == Ending::kLate) ++num_late_;
}

}  // namespace cadre
