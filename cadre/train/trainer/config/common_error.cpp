#include "cadre/train/trainer/config/common_error.h"

#include <optional>

#include "cadre/core/base/format.h"
#include "cadre/tensor/group/agreement.h"

namespace cadre::train {
namespace {

// The name of the operation in errors about ranks with different inputs.
constexpr const char* kSubject = "cadre train";

}  // namespace

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

// with_common_errors() is not used here: an error of one rank's own work may have the code of a
// group failure, for example a kTimeout of a program that the rank runs.
void on_all_ranks(const ProcessGroup& world, const std::function<void()>& prepare) {
  const std::optional<CommonRefusal> refusal = common_refusal(world, kSubject, prepare);
  if (!refusal) return;
  if (refusal->num_refusing == world.world_size()) throw CommonError(refusal->error);
  throw CommonError(
      Error(refusal->error.code(), cadre::format("{} (on rank {} of {})", refusal->error.message(),
                                                 refusal->rank, world.world_size())));
}

void on_first_rank(const ProcessGroup& world, const std::function<void()>& work) {
  const std::optional<CommonRefusal> refusal = common_refusal(world, kSubject, [&] {
    if (world.rank() == 0) work();
  });
  if (refusal) throw CommonError(refusal->error);
}

void check_common(const ProcessGroup& world,
                  const std::function<std::vector<AgreedField>()>& make_fields) {
  with_common_errors([&] {
    check_equal_on_all_ranks(world, kSubject, make_fields,
                             "start all processes with the same configuration, data, weights and "
                             "snapshots");
  });
}

}  // namespace cadre::train
