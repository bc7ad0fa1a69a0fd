// Full gradients of a rank that no pass has reduced to shards yet: those of backwards without
// reduction, and those that the program has assigned. An optimizer sees only the gradients of the
// shards, so the gradients of the shards show whether the program has cleared the full ones.
//
// A gradient is kept from keep() to end(). During that time the shard always has a gradient. If it
// had none, it gets a placeholder of negative zeros; a reduced gradient of zeros is turned into
// negative zeros, too. Adding to -0.0 gives what adding to 0.0 gives, and zero_grad(false) writes
// positive zeros, so clearing differs from a multiplication. An operation that turns -0.0 into 0.0
// (neg_(), abs_(), add_(0)) counts as clearing.
//
// With refuses_changed_values the values of the shard must not change during that time, because the
// step of an optimizer would have used the zeros instead of the gradient. The version counter and
// one element are compared: a step of torch::optim::SGD that changes neither (no momentum, no
// weight decay) has changed nothing.
//
// Threads: one at a time. Blocking: never. Lifetime: shares the parameters; what the functions of
// Shards use outlives it. Errors: kInvalidArgument from throw_if_changed() and check_complete().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/tensor/hooks/autograd_hooks.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre {

class UnreducedGradients {
 public:
  struct Shards {
    // Returns the shard of a parameter, whose gradient an optimizer sees.
    std::function<at::Tensor(size_t)> leaf;
    // Returns the tensor that becomes the shard's gradient if that is undefined. Its values do not
    // matter.
    std::function<at::Tensor(size_t)> memory;
    // Returns whether the parameter's gradient is a placeholder of RefusedGradients, which throws
    // on any access.
    std::function<bool(size_t)> is_refused;
    bool refuses_changed_values;
    // Called when the program has cleared a gradient that was kept.
    std::function<void()> on_cleared;
  };
  // `parameters` are leaves that require grad. `place` names the wrapper and the rank, with which
  // errors begin.
  UnreducedGradients(const std::vector<NamedTensor>& parameters, std::string place, Shards shards);

  // Keeps the gradient until a pass has taken it or the program has cleared it.
  void keep(size_t parameter);
  // Called when a pass has taken the gradient.
  void end(size_t parameter);
  // Removes the gradient.
  void drop(size_t parameter);
  // Returns whether a backward has added to the gradient since it was kept or taken.
  bool is_arriving(size_t parameter) const { return locals_[parameter].is_arriving; }

  // Called before a backward adds to the gradient: keeps a gradient that the program has assigned,
  // and drops one that the program has cleared or that a backward has left which ended by an
  // exception.
  void review(size_t parameter);
  // Calls review() for every parameter except this one.
  void review_all(std::optional<size_t> except);
  // Throws if a review has found that the program has changed the gradient of a shard without
  // clearing it, or has written to a shard while its gradient was kept.
  void throw_if_changed();
  // Throws if the shard's gradient does not yet include a gradient of this rank that waits for its
  // reduction. Called before a step, or before another function that reads the shard's gradient.
  void check_complete(size_t parameter) const;

 private:
  struct Values {  // a fingerprint of a shard's values
    uint32_t version = 0;
    uint64_t sample = 0;

    bool operator==(const Values&) const = default;
  };
  struct Local {
    bool is_arriving = false;
    bool is_kept = false;
    bool is_placeholder = false;  // the shard's gradient is a placeholder of zeros
    // The shard's gradient when it was kept; `version` is the version of that gradient.
    const void* shown = nullptr;
    uint32_t version = 0;
    Values values;  // the values of the shard when the gradient was kept first
  };
  enum class Shown : uint8_t { kUnchanged, kCleared, kChanged };
  Shown shown(size_t parameter) const;
  Values values_of(size_t parameter) const;
  void set_changed(size_t parameter, const std::string& what, const std::string& problem);

  std::vector<NamedTensor> parameters_;
  std::string place_;
  Shards shards_;
  std::vector<Local> locals_;  // has one entry for each parameter
  std::optional<Error> change_;
  size_t changed_ = 0;  // the parameter that change_ is about
  wrap::AccumulationHooks hooks_;
};

}  // namespace cadre
