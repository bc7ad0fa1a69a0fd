// Counts that the ranks add up with an all_reduce when a pass (one reduction of all gradients)
// ends. Some are kept for each parameter, the others for each rank. They are exchanged only if the
// trailer of the pass (agreement/trailer.h) shows that some rank has something to report.
//
// Blocking: gather_flags() is collective; the caller runs the all_reduce of counts(). Lifetime:
// copies share the tensor of the counts. Errors: kInvalidArgument and kAborted, the same on all
// ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/core/base/types.h"
#include "cadre/parallel/reduction/agreement/trailer.h"
#include "cadre/parallel/reduction/agreement/wrapper.h"
#include "cadre/tensor/hooks/located_group.h"

namespace cadre::reduction {

// Returns "rank 2", "ranks 0, 2" or "all ranks": the ranks r with flags[r][column] == value.
// `flags` has the shape (world_size, n) and dtype uint8.
std::string ranks_text(const at::Tensor& flags, int64_t column, uint8_t value);

// Gathers the flags of all ranks. Returns a uint8 tensor of shape (world_size, own.size()).
// Collective.
at::Tensor gather_flags(const std::vector<uint8_t>& own, const wrap::LocatedGroup& group);

class Attention {
 public:
  // `here` describes the wrapper whose pass runs on this rank, and has this rank's number.
  Attention(size_t num_parameters, std::shared_ptr<const Wrapper> here, int world_size);

  // Returns the int32 tensor that the caller sums over the ranks. It has, for each parameter, the
  // number of ranks that use it and of ranks on which it is frozen. Then follow kNumOfRank values
  // for each rank. Its shape is (2 * num_parameters + kNumOfRank * world_size).
  const at::Tensor& counts() const { return counts_; }

  // These functions set what this rank contributes to counts(). They are called before the
  // all_reduce.
  void set_used(size_t parameter) { values()[parameter] = 1; }
  void set_frozen(size_t parameter) { values()[num_parameters_ + parameter] = 1; }
  void set_gave_up() { of_rank(kGaveUp, here_->rank) = 1; }
  void set_suspicion(uint32_t reasons) {
    of_rank(kSuspicion, here_->rank) = static_cast<int32_t>(reasons);
  }
  void set_exchanged() { of_rank(kExchanged, here_->rank) = 1; }
  void set_position(const StepPosition& position) {
    of_rank(kOlder, here_->rank) = position.num_older;
    of_rank(kNewer, here_->rank) = position.num_newer;
    of_rank(kPlaces, here_->rank) = position.places;
  }
  void set_wrapper(uint32_t number) {
    of_rank(kWrapper, here_->rank) = static_cast<int32_t>(number);
  }
  void set_num_writes(uint8_t count) { of_rank(kNumWrites, here_->rank) = count; }
  void set_samples(uint32_t digest) {
    of_rank(kSamples, here_->rank) = static_cast<int32_t>(digest);
  }

  int world_size() const { return static_cast<int>(world_size_); }

  // These functions read the sums over all ranks in counts(). They are called after the all_reduce.
  int num_users(size_t parameter) const { return values()[parameter]; }
  int num_frozen(size_t parameter) const { return values()[num_parameters_ + parameter]; }
  bool gave_up(Rank rank) const { return of_rank(kGaveUp, rank) != 0; }
  // Returns a bit set of reasons why the rank's parameters may differ from those of other ranks
  // (see ReplicaWatch).
  uint32_t suspicion(Rank rank) const { return static_cast<uint32_t>(of_rank(kSuspicion, rank)); }
  bool some_have_suspicion(uint32_t reasons) const;
  bool num_writes_differ() const { return differs(kNumWrites); }
  bool samples_differ() const { return differs(kSamples); }
  bool replicas_may_differ() const;
  // Returns whether some rank has run a differentiable collective (cadre::functional) among ranks
  // that may have unequal sample weights.
  bool some_have_exchanged() const;
  StepPosition position(Rank rank) const {
    return {.num_older = of_rank(kOlder, rank),
            .num_newer = of_rank(kNewer, rank),
            .places = of_rank(kPlaces, rank)};
  }
  // Returns the number of the wrapper whose gradients the rank reduces in this pass.
  uint32_t wrapper(Rank rank) const { return static_cast<uint32_t>(of_rank(kWrapper, rank)); }
  // Returns whether all ranks are in the same step of the same wrapper.
  bool ranks_are_in_one_step() const;

  // Throws if the ranks are in different steps. `step` is the number that the current step has on a
  // rank where every forward had a backward; each forward without one adds 1.
  void check_ranks_are_in_one_step(int64_t step) const;
  void check_no_rank_gave_up() const;

 private:
  [[noreturn]] void refuse_other_wrapper(Rank rank) const;
  [[noreturn]] void refuse_other_step(Rank rank, int64_t step) const;
  [[noreturn]] void refuse_other_part(Rank rank) const;
  [[noreturn]] void refuse_other_places(Rank rank) const;
  [[noreturn]] void refuse_unlike_backward(std::string_view what, std::string_view rule) const;
  // The kinds of counts that are kept for each rank; each kind has world_size elements.
  enum OfRank : size_t {
    kGaveUp,
    kSuspicion,
    kExchanged,
    kOlder,
    kNewer,
    kPlaces,
    kWrapper,
    kNumWrites,
    kSamples,
    kNumOfRank
  };
  size_t place_of(OfRank what, Rank rank) const {
    return 2 * num_parameters_ + what * world_size_ + static_cast<size_t>(rank.value);
  }
  int32_t& of_rank(OfRank what, Rank rank) { return values()[place_of(what, rank)]; }
  int32_t of_rank(OfRank what, Rank rank) const { return values()[place_of(what, rank)]; }
  bool differs(OfRank what) const;
  int32_t* values() { return counts_.mutable_data_ptr<int32_t>(); }
  const int32_t* values() const { return counts_.const_data_ptr<int32_t>(); }

  size_t num_parameters_;
  std::shared_ptr<const Wrapper> here_;
  size_t world_size_;
  at::Tensor counts_;
};

}  // namespace cadre::reduction
