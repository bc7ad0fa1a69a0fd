// Communication hooks: what DistributedDataParallel does with a bucket of gradients in place of an
// all_reduce, for example to send fewer bytes.
//
//   options.comm_hook = cadre::comm_hooks::bf16_compress();
//
// The ranks' gradients are weighted before a hook gets them, by the option `weighting` of the
// wrapper: the hook computes the sum over the ranks, and never divides by their number. So each
// hook is right with each weighting.
//
// Threads: a hook is called in the thread that runs backward(). Blocking: start() should not block;
// what it returns does. Lifetime: a CommHook is a constant value, and each wrapper makes a State of
// its own from it. Errors: if a hook throws on one rank, the wrapper aborts its group, so that all
// ranks get an error that names the rank. Source: torch.distributed.GradBucket,
// register_comm_hook().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/tensor/group/process_group.h"

namespace cadre {

// A bucket whose gradients are complete on this rank.
struct GradBucket {
  size_t index = 0;      // its place in the order in which the buckets are reduced, from 0
  bool is_last = false;  // whether it is the last one of this backward
  // (n), contiguous: this rank's gradients, already multiplied by this rank's weight. When the
  // reduction is finished it must have the sum over the ranks.
  at::Tensor buffer = {};
  std::vector<at::Tensor> gradients = {};  // views of the buffer, in the shapes of the parameters
  std::vector<at::Tensor> parameters = {};
  // This rank's weight. The weights of all ranks add up to 1, or each is 1 under
  // GradientWeighting::kSum.
  double weight = 1.0;
};

// Waits for the reduction of a bucket and writes its result into the buffer.
using FinishReduction = std::function<void()>;

// What a hook must save so that a resumed run continues as the saved one, under names. The tensors
// are those of one rank.
using SavedCommHook = std::vector<std::pair<std::string, at::Tensor>>;

struct CommHookTraits {
  // Whether the ranks may get different gradients, and so train different parameters. Then the
  // wrapper does not compare the parameters of the ranks, and refuses GradientWeighting::kSum.
  bool replicas_may_differ = false;
};

class CADRE_EXPORT CommHook {
 public:
  // What one wrapper does with its buckets, and keeps between steps.
  class CADRE_EXPORT State {
   public:
    virtual ~State() = default;
    // Starts the reduction of a bucket. All ranks start their buckets in the same order, and finish
    // them in the same order when all but the last, or the last one, were started. So a function
    // that is returned may run collectives, too.
    virtual FinishReduction start(const GradBucket& bucket, const ProcessGroup& group) = 0;
    // Returns an empty list if nothing must be saved.
    virtual SavedCommHook saved() const { return {}; }
    // Takes back what saved() has returned on this rank.
    virtual void load(const SavedCommHook& saved);
  };
  using MakeState = std::function<std::unique_ptr<State>()>;

  // name: identifies the hook and its options; the ranks compare it.
  CommHook(std::string name, MakeState make_state, const CommHookTraits& traits = {})
      : name_(std::move(name)), make_state_(std::move(make_state)), traits_(traits) {}

  const std::string& name() const { return name_; }
  const CommHookTraits& traits() const { return traits_; }
  std::unique_ptr<State> make_state() const { return make_state_(); }

 private:
  std::string name_;
  MakeState make_state_;
  CommHookTraits traits_;
};

}  // namespace cadre
