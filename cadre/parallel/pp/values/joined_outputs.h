// The outputs of the last stage for the whole batch, joined from those of its microbatches.
//
// Threads: one. Blocking: never. Lifetime: keeps copies of the outputs, which the stage may change
// in place later. Errors: kInvalidArgument for outputs that cannot be joined.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace cadre::parallel {

class JoinedOutputs {
 public:
  // batch_dim: the dimension of the outputs that counts rows.
  JoinedOutputs(int num_microbatches, int64_t batch_dim)
      : by_microbatch_(static_cast<size_t>(num_microbatches)), batch_dim_(batch_dim) {}

  struct Microbatch {
    int index;
    int64_t num_rows;
  };
  // Called once for each microbatch, in any order. Throws for outputs whose dimension batch_dim
  // does not count the rows, and for outputs that differ from those of another microbatch in
  // number, dtype or other sizes.
  void add(const Microbatch& microbatch, const std::vector<at::Tensor>& outputs);
  // Called after all microbatches were added. Tensors of 0 dimensions become one of
  // (num_microbatches).
  std::vector<at::Tensor> join() const;

 private:
  // Compares one output with that of the first microbatch that has been added.
  void check(const Microbatch& microbatch, size_t index, const at::Tensor& output) const;

  std::vector<std::vector<at::Tensor>> by_microbatch_;
  std::optional<std::vector<at::Tensor>> first_ = {};  // the outputs that were added first
  int64_t batch_dim_;
};

}  // namespace cadre::parallel
