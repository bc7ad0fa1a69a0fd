#include "cadre/parallel/reduction/agreement/attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre::reduction {

std::string ranks_text(const at::Tensor& flags, int64_t column, uint8_t value) {
  std::string text;
  int64_t num_found = 0;
  for (int64_t rank = 0; rank < flags.size(0); ++rank) {
    if (flags.const_data_ptr<uint8_t>()[rank * flags.size(1) + column] != value) continue;
    text += format("{}{}", num_found++ == 0 ? "" : ", ", rank);
  }
  if (num_found == flags.size(0)) return "all ranks";
  return (num_found == 1 ? "rank " : "ranks ") + text;
}

at::Tensor gather_flags(const std::vector<uint8_t>& own, const wrap::LocatedGroup& group) {
  const auto num_flags = static_cast<int64_t>(own.size());
  const at::Tensor mine = at::empty({num_flags}, at::kByte);
  std::copy(own.begin(), own.end(), mine.mutable_data_ptr<uint8_t>());
  const at::Tensor all = at::empty({group.world_size() * num_flags}, at::kByte);
  group.all_gather(all, mine);
  return all.view({group.world_size(), num_flags});
}

Attention::Attention(size_t num_parameters, std::shared_ptr<const Wrapper> here, int world_size)
    : num_parameters_(num_parameters),
      here_(std::move(here)),
      world_size_(static_cast<size_t>(world_size)),
      counts_(at::zeros({static_cast<int64_t>(2 * num_parameters_ + kNumOfRank * world_size_)},
                        at::kInt)) {}

bool Attention::differs(OfRank what) const {
  for (int rank = 1; rank < static_cast<int>(world_size_); ++rank) {
    if (of_rank(what, rank) != of_rank(what, 0)) return true;
  }
  return false;
}

bool Attention::some_have_suspicion(uint32_t reasons) const {
  for (int rank = 0; rank < static_cast<int>(world_size_); ++rank) {
    if ((suspicion(rank) & reasons) != 0) return true;
  }
  return false;
}

bool Attention::replicas_may_differ() const {
  return some_have_suspicion(~uint32_t{0}) || num_writes_differ() || samples_differ();
}

bool Attention::some_have_exchanged() const {
  for (int rank = 0; rank < static_cast<int>(world_size_); ++rank) {
    if (of_rank(kExchanged, rank) != 0) return true;
  }
  return false;
}

bool Attention::ranks_are_in_one_step() const {
  for (int rank = 1; rank < static_cast<int>(world_size_); ++rank) {
    if (wrapper(rank) != wrapper(0) || position(rank) != position(0)) return false;
  }
  return true;
}

void Attention::check_ranks_are_in_one_step(int64_t step) const {
  for (int rank = 1; rank < static_cast<int>(world_size_); ++rank) {
    if (wrapper(rank) != wrapper(0)) refuse_other_wrapper(rank);
  }
  for (int rank = 1; rank < static_cast<int>(world_size_); ++rank) {
    if (position(rank).num_older != position(0).num_older) refuse_other_step(rank, step);
    if (position(rank).num_newer != position(0).num_newer) refuse_other_part(rank);
    if (position(rank).places != position(0).places) refuse_other_places(rank);
  }
}

void Attention::refuse_other_wrapper(Rank rank) const {
  const auto number_text = [this](Rank of) {
    const bool got_other = (wrapper(of) & kGotOtherBuffers) != 0;
    return format("#{}{}", wrapper(of) & ~kGotOtherBuffers,
                  got_other ? " (whose forward got the buffers of another wrapper)" : "");
  };
  throw Error(
      ErrorCode::kInvalidArgument,
      format("{}: the ranks run backward() of different wrappers, or ran forwards of different "
             "wrappers before it, so this backward() would average the gradients of different "
             "models: rank 0 uses wrapper {} and rank {} uses wrapper {} (#n was constructed after "
             "n collectives of the group; on this rank {} is #{}). A step that one rank leaves out "
             "must be left out on all ranks or on none, and all ranks must use their wrappers in "
             "the same order. To continue, bring all ranks to the same step and wrap the modules "
             "again",
             here_->place_with_module(), number_text(0), rank, number_text(rank), here_->module,
             here_->number));
}

void Attention::refuse_other_step(Rank rank, int64_t step) const {
  const int32_t of_0 = position(0).num_older;
  const int32_t of_rank = position(rank).num_older;
  refuse_unlike_backward(
      format("the ranks are in different steps, so this backward() would average gradients of "
             "different steps: rank 0 is in step {} and rank {} in step {}; {} and {} forwards "
             "on these ranks had no backward()",
             step + of_0, rank, step + of_rank, of_0, of_rank),
      "A step that one rank leaves out (a loss that is NaN, an exception in the forward or the "
      "loss) must be left out on all ranks or on none: agree with an all_reduce of a flag before "
      "backward(). A forward that is not trained runs under torch::NoGradGuard");
}

void Attention::refuse_other_part(Rank rank) const {
  const int32_t of_0 = position(0).num_newer;
  refuse_unlike_backward(
      format("the ranks have different parts of a step in this backward(), so it would average "
             "gradients of different forwards: after it, {} newer forward{} on rank 0 and {} on "
             "rank {} still have no backward()",
             of_0, of_0 == 1 ? "" : "s", position(rank).num_newer, rank),
      "A loss that one rank leaves out must be left out on all ranks or on none, and all ranks "
      "call backward() through the same forwards. A forward that is not trained runs under "
      "torch::NoGradGuard");
}

void Attention::refuse_other_places(Rank rank) const {
  refuse_unlike_backward(
      format("the ranks go through different forwards in this backward(), so it would average "
             "gradients of different forwards: {} forwards have had no backward() on each rank, "
             "but not the same ones on rank 0 and rank {}",
             position(0).num_older + position(0).num_newer, rank),
      "A loss that one rank leaves out must be left out on all ranks or on none");
}

void Attention::refuse_unlike_backward(std::string_view what, std::string_view rule) const {
  throw Error(
      ErrorCode::kInvalidArgument,
      format("{}: {}. {}. To continue, bring all ranks to the same step and wrap the module "
             "again",
             here_->place(), what, rule));
}

void Attention::check_no_rank_gave_up() const {
  for (int rank = 0; rank < static_cast<int>(world_size_); ++rank) {
    if (!gave_up(rank)) continue;
    throw Error(ErrorCode::kAborted,
                format("{}: rank {} left this backward by an "
                       "exception, so its gradients are missing; look at its error. The group is "
                       "usable: zero the gradients and continue with the next step on all ranks",
                       here_->place(), rank));
  }
}

}  // namespace cadre::reduction
