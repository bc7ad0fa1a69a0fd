#include "cadre/core/os/host/process_limit.h"

namespace cadre::os {
namespace {

std::optional<uint64_t> limit_of(rlim_t value) {
  return value == RLIM_INFINITY ? std::nullopt : std::optional<uint64_t>(value);
}

}  // namespace

ProcessLimit process_limit(__rlimit_resource_t resource) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0) return {};
  return {.soft = limit_of(limit.rlim_cur), .hard = limit_of(limit.rlim_max)};
}

}  // namespace cadre::os
