// Averages the models of the ranks every few steps, so that the ranks need not reduce their
// gradients in every step.
//
//   cadre::ModelAverager averager{net, world, {.method = cadre::DiLoCo{.period = 50}}};
//   torch::optim::AdamW optimizer{net->parameters(), 1e-3};
//   ...
//   optimizer.zero_grad();
//   loss_of(net->forward(rows)).backward();  // the rows of this rank
//   optimizer.step();
//   averager.step();  // in each step
//   ...
//   averager.synchronize();  // before all ranks evaluate, or save, the same model
//
// Averaged are the parameters that require grad at construction, each once also if it is tied; a
// parameter that is frozen later is still averaged. The optimizers of the ranks keep their own
// state. Parameters of 16 bits are added in float32 and rounded once.
//
// Threads: one. Blocking: the constructor, synchronize(), load_state(), and those calls of step()
// that average, are collective, until the group's deadline: a rank that does not call step() as
// often as the others is named by their timeout. Lifetime: shares the module and the group. Memory:
// a copy of the trained parameters during an exchange; DiLoCo keeps one more, and the state of its
// outer optimizer. Errors: kInvalidArgument, the same on all ranks and before a parameter has
// changed, for a module whose ranks differ or whose parameters a wrapper has sharded, for options
// without a meaning or that differ between ranks, for parameters that were replaced or unfrozen
// since, and if ranks are in different steps; errors of the group, after which the parameters are
// unchanged, too.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/export.h"
#include "cadre/parallel/averaging/averaging_method.h"
#include "cadre/tensor/mesh/ranks.h"

namespace torch::nn {
class Module;
}

namespace cadre {

// Tensors of one rank under names, which a resumed run must load.
using AveragerState = std::vector<std::pair<std::string, at::Tensor>>;

struct ModelAveragerOptions {
  AveragingMethod method = PeriodicAveraging{};
  // Whether floating-point buffers, such as the running statistics of BatchNorm, become the mean of
  // those with which their parameters are averaged. If false, and for other buffers, each rank
  // keeps its own.
  bool average_buffers = false;
};

class CADRE_EXPORT ModelAverager {
 public:
  // ranks: a group, or a mesh, of whose axes all are averaged over. Gives all ranks the parameters
  // and buffers of rank 0. So a resumed program constructs it first, and then loads the parameters
  // of each rank and the state of the averager.
  ModelAverager(const std::shared_ptr<torch::nn::Module>& module, const Ranks& ranks,
                const ModelAveragerOptions& options = {});
  // Takes a module holder, such as torch::nn::Sequential.
  template <typename Holder>
    requires requires { typename Holder::ContainedType; }
  ModelAverager(const Holder& module, const Ranks& ranks, const ModelAveragerOptions& options = {})
      : ModelAverager(
            std::shared_ptr<torch::nn::Module>(module.is_empty() ? nullptr : module.ptr()), ranks,
            options) {}
  ~ModelAverager();
  ModelAverager(const ModelAverager&) = delete;
  ModelAverager& operator=(const ModelAverager&) = delete;

  // Counts a step, and averages if the method says so for it. Call it on all ranks after the
  // optimizer's step. Returns whether this step exchanged models.
  bool step();
  // Makes the models of all ranks equal now: to their mean, or under DiLoCo to the result of an
  // outer step. Does not count as a step.
  void synchronize();

  // Returns the number of calls of step(), also those of the run whose state was loaded.
  int64_t num_steps() const;
  // Returns whether the last thing that this object did was to make the models of all ranks equal.
  bool is_synchronized() const;

  // Returns what a resumed run must load, besides the parameters and the optimizer of each rank:
  // the number of steps; for DiLoCo also the synchronized weights and the outer optimizer. Under
  // DiLoCo without a hook, and for the other methods, it is the same on all ranks. Shares no
  // memory with this object.
  AveragerState state() const;
  // Takes back what state() has returned. If a rank has a state of another method or model, or the
  // ranks have different states, all ranks throw kInvalidArgument and change nothing.
  void load_state(const AveragerState& state);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cadre
