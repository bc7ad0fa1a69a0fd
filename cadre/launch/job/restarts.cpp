#include "cadre/launch/job/restarts.h"

#include <algorithm>
#include <cstddef>

#include "cadre/core/base/format.h"
#include "cadre/launch/job/exit_meaning.h"

namespace cadre::launch {
namespace {

constexpr size_t kMaxListedFailures = 5;

}  // namespace

Duration RestartPolicy::next_delay(Duration lifetime) {
  ++num_restarts_;
  if (lifetime >= kShortLifetime) {
    delay_ = Duration{};
    return delay_;
  }
  const Duration delay = delay_;
  delay_ = std::clamp(2 * delay, kFirstDelay, kMaxDelay);
  return delay;
}

std::string failures_text(std::span<const WorkerExit> failures) {
  const size_t num_hidden = failures.size() - std::min<size_t>(failures.size(), kMaxListedFailures);
  std::string text = num_hidden == 0 ? "" : cadre::format("{} not listed", num_hidden);
  for (const WorkerExit& failure : failures.subspan(num_hidden)) {
    text += cadre::format("{}rank {}: {} after {:.1f} s", text.empty() ? "" : "; ", failure.rank,
                          exit_name(failure.status),
                          std::chrono::duration<double>(failure.lifetime).count());
  }
  return text;
}

}  // namespace cadre::launch
