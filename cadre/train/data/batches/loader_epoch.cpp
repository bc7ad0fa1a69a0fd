#include "cadre/train/data/batches/loader_epoch.h"

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre::data {

void LoaderLoops::refuse() const {
  throw Error(ErrorCode::kInvalidArgument,
              cadre::format("{}: this loop has ended, because another epoch(), {}() or begin() of "
                            "its loader was called since it was begun, and a loader has one "
                            "position; make a loader for each loop",
                            loader_, seek_));
}

}  // namespace cadre::data
