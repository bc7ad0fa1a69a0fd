#include "cadre/core/os/host/wall_clock.h"

#include <time.h>

#include "cadre/core/base/format.h"

namespace cadre::os {

namespace {

// Returns a text such as "2026-11-21T10:04:11".
std::string date_and_time(time_t seconds) {
  tm parts{};
  ::gmtime_r(&seconds, &parts);
  return cadre::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}", 1900L + parts.tm_year,
                       parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec);
}

}  // namespace

std::string wall_clock_text() {
  constexpr long kNsPerMs = 1'000'000;
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return cadre::format("{}.{:03}Z", date_and_time(now.tv_sec), now.tv_nsec / kNsPerMs);
}

std::string wall_clock_text(int64_t seconds) {
  return date_and_time(seconds) + "Z";
}

int64_t wall_clock_seconds() {
  return ::time(nullptr);
}

int64_t wall_clock_milliseconds() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
}

}  // namespace cadre::os
