#include "cadre/parallel/reduction/agreement/exchanges.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <utility>

#include "cadre/parallel/reduction/agreement/attention.h"
#include "cadre/parallel/reduction/agreement/refusals.h"

namespace cadre::reduction {

std::vector<std::vector<int>> shared_ranks(std::span<const std::vector<int>> groups,
                                           const wrap::LocatedGroup& group) {
  std::vector<std::vector<int>> shared;
  for (const std::vector<int>& ranks : groups) {
    std::vector<int> here;
    for (const int global : ranks) {
      if (const auto rank = group.process_group().group_rank(global)) here.push_back(*rank);
    }
    if (here.size() > 1) shared.push_back(std::move(here));
  }
  return shared;
}

void check_equal_samples(std::span<const std::vector<int>> exchanged, int64_t num_samples,
                         const Wrapper& here, const wrap::LocatedGroup& group) {
  const int world_size = group.world_size();
  const at::Tensor samples = at::empty({world_size}, at::kLong);
  group.all_gather(samples, at::full({1}, num_samples, at::kLong));
  const int64_t* const of_ranks = samples.const_data_ptr<int64_t>();
  const bool is_unequal = std::ranges::any_of(exchanged, [&](const std::vector<int>& ranks) {
    return std::ranges::any_of(ranks, [&](int rank) { return of_ranks[rank] != num_samples; });
  });
  const at::Tensor flags = gather_flags({static_cast<uint8_t>(is_unequal ? 1 : 0)}, group);
  const uint8_t* const first = flags.const_data_ptr<uint8_t>();
  if (std::find(first, first + world_size, 1) == first + world_size) return;
  const auto* const unlike = std::find_if(
      of_ranks, of_ranks + world_size, [of_ranks](int64_t count) { return count != of_ranks[0]; });
  refuse_exchange(
      here, ranks_text(flags, 0, 1),
      {.of_0 = of_ranks[0], .of_other = *unlike, .other = static_cast<int>(unlike - of_ranks)});
}

}  // namespace cadre::reduction
