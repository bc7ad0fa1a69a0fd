#include "cadre/core/comm/queue/refused_call.h"

#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre {

void refuse_call(std::string message) {
  throw Error(ErrorCode::kInvalidArgument, std::move(message));
}

void check_rank(std::string_view call, std::string_view what, Rank rank, int world_size) {
  if (rank >= 0 && rank < world_size) return;
  refuse_call(format("{}: {} {} is not in the group of {} ranks", call, what, rank, world_size));
}

}  // namespace cadre
