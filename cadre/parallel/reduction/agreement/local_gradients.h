// The gradients that this rank alone has accumulated since the last reduction, and the samples that
// they are the mean of.
//
// Threads: one. Blocking: never. Lifetime: shares the parameters; the ledger outlives it, and it
// outlives each backward that it accumulates. Errors: none.
// Samples belong to gradients: when the program has cleared those, to none or to zeros, the samples
// are gone too. Zeros are looked for only in gradients that the program has assigned, or changed in
// place, since the last accumulation, so an ordinary step reads no element.
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
  // `on_accumulated`: called at the end of each backward that accumulates.
  LocalGradients(std::vector<at::Tensor> parameters, ForwardLedger& ledger,
                 std::function<void()> on_accumulated);

  // A backward of this rank has added to the gradient.
  void set_touched(size_t parameter) { is_touched_[parameter] = true; }
  // It has, and the gradient is still there.
  bool contribute(size_t parameter) const;
  // The program has assigned the gradient, or has changed it in place, since the last accumulation
  // or reduction.
  bool is_changed(size_t parameter) const;

  // In a backward under no_sync(), at each output and gradient: when it ends, the samples of the
  // forwards that it carries are counted. `reached`: the forward whose output it passes, or null.
  void accumulate(const Forward* reached, std::optional<size_t> just_touched);
  // Forgets the samples if the gradients that they belong to were cleared. `just_touched`: one that
  // the running backward has added to already, so it shows nothing.
  void forget_if_cleared(std::optional<size_t> just_touched);
  // For a pass: the next accumulation begins.
  int64_t take_samples();
  // The ranks of the differentiable collectives that its backwards have run, by group.
  std::vector<std::vector<int>> take_collectives() { return std::exchange(collectives_, {}); }
  // All gradients were reduced.
  void set_reduced();

 private:
  // A gradient as it was seen last. It does not keep the tensor; while it lives no other tensor has
  // the same address.
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
  // How each gradient was after the last accumulation or reduction; nothing where it was undefined.
  std::vector<std::optional<Seen>> seen_;
  int64_t num_samples_ = 0;
  std::vector<std::vector<int>> collectives_;
  bool is_in_backward_ = false;
  int backward_ = 0;                     // its number
  std::vector<CarriedForward> carried_;  // by that backward
};

}  // namespace cadre::reduction
