#include "cadre/parallel/fsdp/use_comparison.h"

#include <ATen/ops/empty.h>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/fsdp/unit_options.h"

namespace cadre::parallel {

namespace {

constexpr int64_t kUses = int64_t{1} << 24;
constexpr int64_t kPasses = 8;  // a power of two, at least the number of kinds of a pass

int64_t code_of(const UnitSchedule::Use& use) {
  return static_cast<int64_t>(use.num_updates) * kUses + static_cast<int64_t>(use.unit) * kPasses +
         static_cast<int64_t>(use.pass);
}

std::string pass_text(UnitOrder::Pass pass) {
  switch (pass) {
    case UnitOrder::Pass::kForward:
      return "forward()";
    case UnitOrder::Pass::kForwardWithoutGrad:
      return "forward() without grad";
    case UnitOrder::Pass::kOutside:
      return "an operation outside of forward() and backward()";
    case UnitOrder::Pass::kBackward:
    case UnitOrder::Pass::kUpdate:
      break;
  }
  return "backward()";
}

}  // namespace

void UseComparison::operator()(const UnitSchedule::Use& use) const {
  const int world_size = group_.world_size();
  if (world_size == 1) return;
  const at::Tensor own = at::empty({1}, at::kLong);
  own.mutable_data_ptr<int64_t>()[0] = code_of(use);
  const at::Tensor all = at::empty({world_size}, at::kLong);
  group_.all_gather(all, own);
  const int64_t* codes = all.const_data_ptr<int64_t>();
  for (int rank = 1; rank < world_size; ++rank) {
    if (codes[rank] == codes[0]) continue;
    if (codes[rank] / kUses != codes[0] / kUses) {
      throw Error(
          ErrorCode::kInvalidArgument,
          format("{}, {}: the ranks have updated their shards at different times: since the "
                 "wrapper was made rank 0 has updated them {} times, rank {} {} times. Call step() "
                 "of the optimizer on all ranks or on none",
                 kFullySharded, group_.rank_text(), codes[0] / kUses, rank, codes[rank] / kUses));
    }
    throw Error(ErrorCode::kInvalidArgument,
                format("{}, {}: the ranks use different units: rank 0 uses {}, rank {} uses "
                       "{}. Call the same units in the same order on all ranks, and in an "
                       "evaluation give all ranks the same number of batches",
                       kFullySharded, group_.rank_text(), text_of_code(codes[0]), rank,
                       text_of_code(codes[rank])));
  }
}

std::string UseComparison::text_of_code(int64_t code) const {
  const auto unit = static_cast<size_t>(code % kUses / kPasses);
  if (unit >= names_.size()) return "summon_full_params()";
  return format("{} in {}", unit == 0 ? "the root" : format("\"{}\"", names_[unit]),
                pass_text(static_cast<UnitOrder::Pass>(code % kPasses)));
}

}  // namespace cadre::parallel
