// Tracks whole gradients of a rank that are not reduced to shards yet: those of backwards under
// no_sync(), and those that the program has assigned. The program's optimizer sees only the
// gradients of the shards. So this class concludes from the gradient of a shard whether the program
// has cleared the whole gradient.
//
// A whole gradient is kept from keep() until end() or drop(). During that time the shard always has
// a gradient: if it had none, it gets a placeholder of negative zeros, and if it had one of zeros,
// these become negative zeros. zero_grad(false) writes positive zeros, which can be told from a
// scaled placeholder. Adding a number to -0.0 gives the same as adding it to 0.0. An operation that
// turns -0.0 into 0.0 (neg_(), abs_(), add_(0)) is mistaken for clearing.
//
// With refuses_changed_values the values of the shard must not change during that time, because an
// optimizer step would have used the zeros instead of the gradient. The version counter and one
// element are compared. A step of torch::optim::SGD with zero gradients, without momentum and
// weight decay, changes neither, and is not an error.
//
// Threads: one at a time. Lifetime: shares the parameters; the objects that the functions in Shards
// refer to must outlive it. Errors: kInvalidArgument from throw_if_changed() and check_complete().
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
    // Returns this rank's shard of a parameter, which the optimizer updates.
    std::function<at::Tensor(size_t)> leaf;
    // Returns a tensor with any values, which becomes the shard's gradient if the shard has none.
    std::function<at::Tensor(size_t)> memory;
    // Returns whether the whole parameter's gradient is a placeholder of RefusedGradients, which
    // throws on any access.
    std::function<bool(size_t)> is_refused;
    bool refuses_changed_values;
    // Called when the program has cleared a kept gradient.
    std::function<void()> on_cleared;
  };
  // parameters: leaves that require grad. place: the wrapper and the rank, with which errors begin.
  UnreducedGradients(const std::vector<NamedTensor>& parameters, std::string place, Shards shards);

  // Starts to track the gradient, until a pass has reduced it or the program has cleared it.
  void keep(size_t parameter);
  // Called when a pass reduces the gradient: it is no longer kept.
  void end(size_t parameter);
  // Sets the whole gradient to undefined; it is no longer kept.
  void drop(size_t parameter);
  // Returns whether a backward has added to the gradient since the last call of keep() or end().
  bool is_arriving(size_t parameter) const { return locals_[parameter].is_arriving; }

  // Called before a backward adds to the gradient. Keeps a gradient that the program has assigned.
  // Drops a gradient that the program has cleared, or that was left by a backward that threw.
  void review(size_t parameter);
  // Calls review() for every parameter except `except`.
  void review_all(std::optional<size_t> except);
  // Throws if a review has found that, while a gradient was kept, the program has changed the
  // gradient of the shard without clearing it or, with refuses_changed_values, has written to the
  // shard.
  void throw_if_changed();
  // Throws if this rank has a gradient of the parameter that is not reduced to the shard yet.
  // Called before an optimizer step, and before other functions that read the shard's gradient.
  void check_complete(size_t parameter) const;

 private:
  struct Values {  // what is compared to notice a change of a shard's values
    uint32_t version = 0;
    uint64_t sample = 0;

    bool operator==(const Values&) const = default;
  };
  struct Local {
    bool is_arriving = false;
    bool is_kept = false;
    bool is_placeholder = false;  // the shard's gradient is a placeholder of negative zeros
    // The shard's gradient at the last keep(), and its version counter.
    const void* shown = nullptr;
    uint32_t version = 0;
    Values values;  // the shard's values at the first keep()
  };
  enum class Shown : uint8_t { kUnchanged, kCleared, kChanged };
  Shown shown(size_t parameter) const;
  Values values_of(size_t parameter) const;
  void set_changed(size_t parameter, const std::string& what, const std::string& problem);

  std::vector<NamedTensor> parameters_;
  std::string place_;
  Shards shards_;
  std::vector<Local> locals_;  // one entry for each parameter
  std::optional<Error> change_;
  size_t changed_ = 0;  // the parameter to which change_ belongs
  wrap::AccumulationHooks hooks_;
};

}  // namespace cadre
