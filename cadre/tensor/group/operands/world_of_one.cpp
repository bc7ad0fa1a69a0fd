#include "cadre/tensor/group/operands/world_of_one.h"

#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/comm/communicator.h"

namespace cadre {
namespace {

// The innermost scope of this thread; null outside of any scope. It is thread-local, because the
// module's forward() that runs in the scope already holds its groups, so a scope cannot be passed
// to them.
thread_local const WorldOfOneScope* innermost = nullptr;

}  // namespace

WorldOfOneScope::WorldOfOneScope(std::string_view remedy)
    : outer_(std::exchange(innermost, this)), remedy_(remedy) {}

WorldOfOneScope::~WorldOfOneScope() {
  innermost = outer_;
}

void WorldOfOneScope::check(const Communicator& group, std::string_view call) {
  if (innermost == nullptr || group.world_size() == 1) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: group \"{}\" has {} ranks, but this thread must compute as in a world of "
                     "one process: {}",
                     call, group.name(), group.world_size(), innermost->remedy_));
}

}  // namespace cadre
