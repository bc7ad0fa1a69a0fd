// The gradients that this rank has accumulated since the last reduction, and the number of samples
// over which they are the mean.
//
// Threads: one thread. Lifetime: shares the parameters; the ledger outlives this object, and this
// object outlives each backward under no_sync().
// Samples are counted together with gradients: when the program clears the gradients (makes them
// undefined or zero), the count of their samples is reset, too. Only gradients that the program has
// assigned, or changed in place, since the last accumulation are searched for zeros, so an ordinary
// step reads no element.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "cadre/parallel/reduction/agreement/forward_ledger.h"

namespace cadre::reduction {

class LocalGradients {
 public:
  // `on_accumulated` is called at the end of each backward under no_sync().
  LocalGradients(std::vector<at::Tensor> parameters, ForwardLedger& ledger,
                 std::function<void()> on_accumulated);

  // Called when a backward of this rank has added to the gradient.
  void set_touched(size_t parameter) { is_touched_[parameter] = true; }
  // Returns whether a backward of this rank has added to the gradient, and the gradient still
  // exists.
  bool contribute(size_t parameter) const;
  // Returns whether the program has assigned the gradient, or has changed it in place, since the
  // last accumulation or reduction.
  bool is_changed(size_t parameter) const;

  // Called in a backward under no_sync(), once for each output and gradient that it reaches. When
  // the backward ends, the samples of its forwards are counted. `reached` is the forward whose
  // output the backward passes, or null.
  void accumulate(const Forward* reached, std::optional<size_t> just_touched);
  // Resets the count of samples if the program has cleared the gradients to which they belong.
  // `just_touched` is a parameter to whose gradient the running backward has already added, so this
  // gradient does not show whether the program had cleared it.
  void forget_if_cleared(std::optional<size_t> just_touched);
  // Returns the number of accumulated samples for a pass, and counts from 0 again.
  int64_t take_samples();
  // Returns the number of samples of each accumulated forward.
  const std::vector<int64_t>& samples() const { return samples_; }
  // Returns the differentiable collectives that ran in the accumulated backwards: the ranks of each
  // group in which one ran.
  std::vector<std::vector<int>> take_collectives() { return std::exchange(collectives_, {}); }
  // Called when all gradients were reduced.
  void set_reduced();

 private:
  // The last known state of a gradient. The weak pointer does not keep the tensor alive, but it
  // prevents that another tensor gets the same address.
  struct Seen {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    uint32_t version;
  };

  std::optional<Seen> seen_now(size_t parameter) const;
  void finish_backward();
  bool are_cleared(std::optional<size_t> just_touched) const;
  bool is_changed_to_zeros(size_t parameter) const;

  std::vector<at::Tensor> parameters_;
  ForwardLedger& ledger_;
  std::vector<bool> is_touched_;
  std::function<void()> on_accumulated_;
  // The state of each gradient after the last accumulation or reduction; nullopt if it was
  // undefined.
  std::vector<std::optional<Seen>> seen_;
  std::vector<int64_t> samples_;
  std::vector<std::vector<int>> collectives_;
  bool is_in_backward_ = false;
  int backward_ = 0;                     // the number of the running backward
  std::vector<CarriedForward> carried_;  // the forwards that the running backward carries
};

}  // namespace cadre::reduction
