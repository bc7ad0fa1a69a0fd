#include "cadre/core/fabric/fork_guard.h"

#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre {

ForkGuard::ForkGuard(std::string group, Rank rank, int pid,
                     std::shared_ptr<const os::ForkMark> mark)
    : mark_(std::move(mark)), group_(std::move(group)), rank_(rank), pid_(pid) {}

void ForkGuard::refuse() const {
  throw Error(ErrorCode::kInvalidArgument,
              format("group \"{}\" belongs to rank {}, pid {}, from which this process was forked: "
                     "it has none of the group's threads and shares its connections. Remedy: "
                     "connect a new group in the child, or use this one in its parent only",
                     group_, rank_, pid_));
}

}  // namespace cadre
