// What the ranks tell each other when the trailer of a pass says that one of them has news: counts
// by parameter and by rank, reduced to their sums over ranks.
//
// Threads: one. Blocking: never; the caller reduces counts(). Lifetime: a value that shares its
// tensor. Errors: kInvalidArgument and kAborted, the same on all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/base/types.h"
#include "cadre/reduction/agreement/trailer.h"
#include "cadre/reduction/agreement/wrapper.h"

namespace cadre::reduction {

// "rank 2", "ranks 0, 2" or "all ranks": those whose flag of `column` has the value. flags:
// (world_size, n) uint8.
std::string ranks_text(const at::Tensor& flags, int64_t column, uint8_t value);

class Attention {
 public:
  // `here`: the wrapper on this rank.
  Attention(size_t num_parameters, std::shared_ptr<const Wrapper> here, int world_size);

  // (2 * num_parameters + 5 * world_size) int32.
  const at::Tensor& counts() const { return counts_; }

  // Of this rank, before the reduction.
  void set_used(size_t parameter) { values()[parameter] = 1; }
  void set_frozen(size_t parameter) { values()[num_parameters_ + parameter] = 1; }
  void set_gave_up() { values()[2 * num_parameters_ + own()] = 1; }
  void set_position(const StepPosition& position) {
    values()[2 * num_parameters_ + world_size_ + own()] = position.num_older;
    values()[2 * num_parameters_ + 2 * world_size_ + own()] = position.num_newer;
    values()[2 * num_parameters_ + 3 * world_size_ + own()] = position.places;
  }
  void set_wrapper(uint32_t number) {
    values()[2 * num_parameters_ + 4 * world_size_ + own()] = static_cast<int32_t>(number);
  }

  // After it.
  int num_users(size_t parameter) const { return values()[parameter]; }
  int num_frozen(size_t parameter) const { return values()[num_parameters_ + parameter]; }
  bool gave_up(Rank rank) const { return values()[2 * num_parameters_ + index(rank)] != 0; }
  StepPosition position(Rank rank) const {
    const int32_t* older = values() + 2 * num_parameters_ + world_size_;
    return {.num_older = older[index(rank)],
            .num_newer = older[world_size_ + index(rank)],
            .places = older[2 * world_size_ + index(rank)]};
  }
  // Number of the wrapper that the rank's pass belongs to.
  uint32_t wrapper(Rank rank) const {
    return static_cast<uint32_t>(values()[2 * num_parameters_ + 4 * world_size_ + index(rank)]);
  }
  // Of one wrapper.
  bool ranks_are_in_one_step() const;

  // `step`: the number of the step of a rank that left nothing behind.
  void check_ranks_are_in_one_step(int64_t step) const;
  void check_no_rank_gave_up() const;

 private:
  [[noreturn]] void refuse_other_wrapper(Rank rank) const;
  [[noreturn]] void refuse_other_step(Rank rank, int64_t step) const;
  [[noreturn]] void refuse_other_part(Rank rank) const;
  [[noreturn]] void refuse_other_places(Rank rank) const;
  [[noreturn]] void refuse_unlike_backward(std::string_view what, std::string_view rule) const;
  static size_t index(Rank rank) { return static_cast<size_t>(rank.value); }
  size_t own() const { return index(here_->rank); }
  int32_t* values() { return counts_.mutable_data_ptr<int32_t>(); }
  const int32_t* values() const { return counts_.const_data_ptr<int32_t>(); }

  size_t num_parameters_;
  std::shared_ptr<const Wrapper> here_;
  size_t world_size_;
  at::Tensor counts_;
};

}  // namespace cadre::reduction
