#include "cadre/parallel/fsdp/written_parameters.h"

#include <utility>

#include "cadre/core/base/format.h"
#include "cadre/parallel/reduction/data_parallel_core.h"

namespace cadre::parallel {

void WrittenParameters::attach(const std::shared_ptr<reduction::DataParallelCore>& core,
                               ShardForm form) {
  core_ = core;
  form_ = form;
}

void WrittenParameters::begin_evaluation() {
  is_in_evaluation_ = true;
  found_.reset();
}

std::optional<Error> WrittenParameters::end_evaluation() noexcept {
  is_in_evaluation_ = false;
  return std::exchange(found_, std::nullopt);
}

void WrittenParameters::tell(const std::string& parameter, const Error& error) {
  if (is_in_evaluation_) {
    if (!found_) found_ = error;
  } else if (const auto core = core_.lock()) {
    core->set_written(parameter);
  }
}

Error WrittenParameters::pass_error(const std::string& parameter, const std::string& ranks) const {
  const bool is_mapped = form_ == ShardForm::kMapped;
  return Error(
      is_mapped ? ErrorCode::kCorruption : ErrorCode::kInvalidArgument,
      format(
          "the program has written to \"{}\" (on {}) while the parameters were {}, as a forward() "
          "does that changes a weight in place (an Embedding with max_norm, a weight that is "
          "normalized). {}. Let forward() compute a new tensor from the weight, or change weights "
          "between two steps: in the shards, or in summon_full_params() with write_back()",
          parameter, ranks, is_mapped ? "mapped" : "gathered",
          is_mapped
              ? "All ranks read and write the same memory, so the values are wrong on all "
                "of them; continue from the last snapshot"
              : "The change is lost, because it is not in the shards of the ranks that own the "
                "parameter; zero the gradients, which were computed with the changed weight"));
}

}  // namespace cadre::parallel
