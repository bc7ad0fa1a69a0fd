#include "cadre/core/os/host/descriptor_limit.h"

#include <sys/resource.h>

namespace cadre::os {

DescriptorLimit descriptor_limit() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return {.soft = limit.rlim_cur, .hard = limit.rlim_max};
}

DescriptorLimit raise_descriptor_limit() {
  const DescriptorLimit before = descriptor_limit();
  const rlimit raised{.rlim_cur = before.hard, .rlim_max = before.hard};
  ::setrlimit(RLIMIT_NOFILE, &raised);
  return before;
}

}  // namespace cadre::os
