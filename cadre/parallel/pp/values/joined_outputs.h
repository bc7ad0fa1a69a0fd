// Concatenates the outputs of the last stage for all microbatches to those of the whole batch.
//
// Lifetime: keeps copies of the outputs, because the stage may later change its tensors in place.
// Errors: kInvalidArgument for outputs that cannot be concatenated.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace cadre::parallel {

class JoinedOutputs {
 public:
  // `batch_dim` is the dimension of the outputs whose size is the number of rows.
  JoinedOutputs(int num_microbatches, int64_t batch_dim)
      : by_microbatch_(static_cast<size_t>(num_microbatches)), batch_dim_(batch_dim) {}

  struct Microbatch {
    int index;
    int64_t num_rows;
  };
  // Adds the outputs of a microbatch. Call it once for each microbatch, in any order. Throws if the
  // size of the dimension batch_dim is not the number of rows, and if the outputs differ from those
  // of another microbatch in number, dtype or other sizes.
  void add(const Microbatch& microbatch, const std::vector<at::Tensor>& outputs);
  // Returns the outputs for the batch. Call it after all microbatches were added. Outputs of shape
  // () are stacked to one tensor of shape (num_microbatches).
  std::vector<at::Tensor> join() const;

 private:
  // Compares one output with that of the microbatch that was added first.
  void check(const Microbatch& microbatch, size_t index, const at::Tensor& output) const;

  std::vector<std::vector<at::Tensor>> by_microbatch_;
  std::optional<std::vector<at::Tensor>> first_ = {};  // the outputs that were added first
  int64_t batch_dim_;
};

}  // namespace cadre::parallel
