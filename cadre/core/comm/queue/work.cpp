#include "cadre/core/comm/queue/work.h"

namespace cadre {

void Work::refuse() {
  throw Error(
      ErrorCode::kInvalidArgument,
      "Work: this handle was moved from and has no operation; use the one that it was moved "
      "to, or copy it instead");
}

}  // namespace cadre
