#include "cadre/parallel/buckets/comm_hook.h"

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre {

void CommHook::State::load(const SavedCommHook& saved) {
  if (saved.empty()) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("the communication hook keeps nothing between steps, but {} tensors were "
                     "saved, the first as \"{}\". Use the hook with which they were saved",
                     saved.size(), saved.front().first));
}

}  // namespace cadre
