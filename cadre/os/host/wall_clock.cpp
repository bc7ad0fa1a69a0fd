#include "cadre/os/host/wall_clock.h"

#include <time.h>

#include "cadre/base/format.h"

namespace cadre::os {

std::string wall_clock_text() {
  constexpr long kNsPerMs = 1'000'000;
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  tm parts{};
  ::gmtime_r(&now.tv_sec, &parts);
  return cadre::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", parts.tm_year + 1900,
                       parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec,
                       now.tv_nsec / kNsPerMs);
}

int64_t wall_clock_seconds() {
  return ::time(nullptr);
}

}  // namespace cadre::os
