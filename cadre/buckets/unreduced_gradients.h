// Full gradients of a rank that no pass has reduced to shards yet: those of backwards without
// reduction, and those that the program has assigned. An optimizer sees the gradients of the shards
// only, so these show whether the program has cleared the others.
//
// A gradient is kept from keep() to end(). Meanwhile the gradient of the shard is there: where it
// was undefined it is a placeholder of zeros, which are negative, as those of a reduced gradient of
// zeros become, because every sum leaves negative zeros as they are. So a zero_grad() that sets
// them to zero is told from a change that multiplies them. One that leaves positive zeros, as
// neg_(), abs_() and add_(0) do, is not told from clearing.
//
// With refuses_changed_values the values of the shard do not change meanwhile: a step of an
// optimizer would have seen the zeros instead of the gradient. One that moves no version counter
// and not the element that is compared, as torch::optim::SGD does on zeros without momentum and
// weight decay, has done nothing.
//
// Threads: one at a time. Blocking: never. Lifetime: shares the parameters; what the functions of
// Shards use outlives it. Errors: kInvalidArgument from throw_if_changed().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cadre/base/error.h"
#include "cadre/wrap/autograd_hooks.h"
#include "cadre/wrap/named_tensors.h"

namespace cadre {

class UnreducedGradients {
 public:
  struct Shards {
    // The shard of a parameter, whose gradient an optimizer sees.
    std::function<at::Tensor(size_t)> leaf;
    // What becomes that gradient where it is undefined. Its values do not matter.
    std::function<at::Tensor(size_t)> memory;
    // Whether the parameter's gradient is one that throws when it is touched.
    std::function<bool(size_t)> is_refused;
    bool refuses_changed_values;
    // The program has cleared a gradient that was kept.
    std::function<void()> on_cleared;
  };
  // parameters: leaves that require grad. place: with which errors begin, the wrapper and the rank.
  UnreducedGradients(const std::vector<NamedTensor>& parameters, std::string place, Shards shards);

  // It counts until a pass has taken it or the program has cleared it.
  void keep(size_t parameter);
  // A pass has taken it.
  void end(size_t parameter);
  // The gradient is removed.
  void drop(size_t parameter);
  // A backward has added to the gradient since it was kept or taken.
  bool is_arriving(size_t parameter) const { return locals_[parameter].is_arriving; }

  // Before a backward adds to it: keeps what the program has assigned, drops what the program has
  // cleared, and what a backward has left that ended by an exception.
  void review(size_t parameter);
  // Of all but one.
  void review_all(std::optional<size_t> except);
  // If a review has found a gradient of a shard that the program has changed otherwise, or a shard
  // that it has written while its gradient was kept.
  void throw_if_changed();

 private:
  struct Values {  // of a shard
    uint32_t version = 0;
    uint64_t sample = 0;

    bool operator==(const Values&) const = default;
  };
  struct Local {
    bool is_arriving = false;
    bool is_kept = false;
    bool is_placeholder = false;  // the shard's gradient is one of zeros made here
    const void* shown = nullptr;  // the shard's gradient, and its version, when it was kept
    uint32_t version = 0;
    Values values;  // when it was kept first
  };
  enum class Shown : uint8_t { kUnchanged, kCleared, kChanged };
  Shown shown(size_t parameter) const;
  Values values_of(size_t parameter) const;
  void set_changed(size_t parameter, const std::string& what, const std::string& problem);

  std::vector<NamedTensor> parameters_;
  std::string place_;
  Shards shards_;
  std::vector<Local> locals_;  // by parameter
  std::optional<Error> change_;
  size_t changed_ = 0;  // the parameter of that
  wrap::AccumulationHooks hooks_;
};

}  // namespace cadre
