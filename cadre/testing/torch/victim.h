// Shared by tests of failures in training: a rank that kills or stops itself, and how soon the
// others must report that.
//
// Threads: one for each rank. Blocking: disturb_self() does not return. For tests only.
#pragma once

#include <signal.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <memory>
#include <string>

#include "cadre/testing/core/process_job.h"

namespace cadre::testing {

inline constexpr int kVictim = 1;
inline constexpr Duration kStopTimeout = std::chrono::seconds(2);
// The guaranteed time: after the signal, or after the deadline if the victim is only stopped.
inline constexpr Duration kLimit = std::chrono::seconds(2);

// What the victim does to itself; the moment just before is kept in a file.
[[noreturn]] inline void disturb_self(RankContext& context, int signal,
                                      const std::string& moment_file) {
  std::ofstream(moment_file) << context.system.now().ns;
  ::raise(signal);
  // A stopped process that is continued must not take part again.
  throw Error(ErrorCode::kInternal, "the victim goes on");
}

inline TimePoint read_moment(const std::string& moment_file) {
  TimePoint moment;
  std::ifstream(moment_file) >> moment.ns;
  return moment;
}

}  // namespace cadre::testing
