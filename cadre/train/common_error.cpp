#include "cadre/train/common_error.h"

#include <optional>

#include "cadre/layers/common_refusal.h"

namespace cadre::train {
bool is_group_failure(const Error& error) {
  return error.code() == ErrorCode::kTimeout || error.code() == ErrorCode::kPeerLost ||
         error.code() == ErrorCode::kAborted;
}

void with_common_errors(const std::function<void()>& run) {
  try {
    run();
  } catch (const Error& error) {
    if (is_group_failure(error)) throw;
    throw CommonError(error);
  }
}

void on_all_ranks(const ProcessGroup& world, const std::function<void()>& prepare) {
  const std::optional<layers::CommonRefusal> refusal = layers::common_refusal(world, prepare);
  if (refusal) throw CommonError(refusal->error);
}

}  // namespace cadre::train
