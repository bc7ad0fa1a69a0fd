#include "cadre/group/world_of_one.h"

#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/format.h"
#include "cadre/comm/communicator.h"

namespace cadre {
namespace {

thread_local bool is_in_world_of_one = false;
thread_local std::string_view remedy_of_world_of_one;

}  // namespace

WorldOfOneScope::WorldOfOneScope(std::string_view remedy)
    : outer_remedy_(std::exchange(remedy_of_world_of_one, remedy)),
      has_outer_(std::exchange(is_in_world_of_one, true)) {}

WorldOfOneScope::~WorldOfOneScope() {
  is_in_world_of_one = has_outer_;
  remedy_of_world_of_one = outer_remedy_;
}

void WorldOfOneScope::check(const Communicator& group, std::string_view call) {
  if (!is_in_world_of_one || group.world_size() == 1) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: group \"{}\" has {} ranks, but this computation is that of a world of "
                     "one process: {}",
                     call, group.name(), group.world_size(), remedy_of_world_of_one));
}

}  // namespace cadre
