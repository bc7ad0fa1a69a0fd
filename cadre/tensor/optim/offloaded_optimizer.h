// Makes an optimizer of torch::optim keep its state in the same file as its parameters, for shards
// that are offloaded to files (FileOffload of FullyShardedDataParallel), so that the state needs no
// main memory either. Cadre's own optimizers do so without this class.
//
//   OffloadedOptimizer<torch::optim::RMSprop> optimizer(model.parameters(), 1e-3);
//
// Threads, lifetime: as O, the optimizer class. Blocking: for disk accesses. Errors: those of O,
// and kUnavailable for a full disk.
// step() updates one parameter at a time: torch::optim creates the state of a parameter in memory,
// and the state is then moved to the file. The update of a parameter by O must not depend on other
// parameters.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

#include "cadre/tensor/group/beside.h"
#include "cadre/tensor/optim/saved_part.h"
#include "cadre/tensor/optim/state_loading.h"
#include "cadre/tensor/optim/state_tensors.h"

namespace cadre {

template <typename O>
class OffloadedOptimizer : public O {
  static_assert(!std::is_void_v<optim_state::StateOf<O>>,
                "cadre::OffloadedOptimizer<O>: O must be AdamW, Adam, SGD, RMSprop or Adagrad of "
                "torch::optim or of Cadre, cadre::Adadelta, or derived from one; others use more "
                "than one parameter at a time, or keep state that is not known here");

 public:
  using O::O;

  at::Tensor step(typename O::LossClosure closure = nullptr) override {
    at::Tensor loss;
    if (closure) {
      optim_state::check_closure_mode("cadre::OffloadedOptimizer");
      const at::AutoGradMode with_grad(true);
      loss = closure();
    }
    check_parameters();
    EmptyGroups groups(*this);
    for (size_t i = 0; i < groups.parameters().size(); ++i) {
      std::vector<at::Tensor>& group = this->param_groups()[i].params();
      for (const at::Tensor& parameter : groups.parameters()[i]) {
        group.assign(1, parameter);
        O::step();
        move_state(parameter);
      }
      group.clear();
    }
    return loss;
  }

  void save(torch::serialize::OutputArchive& archive) const override {
    O::save(archive);
    if constexpr (!optim_state::SavesPart<O>) {
      optim_state::write_part(archive, this->param_groups());
    }
  }
  static constexpr bool kSavesPart = true;

  void load(torch::serialize::InputArchive& archive) override {
    check_parameters();
    optim_state::check_part(archive, this->param_groups(), "cadre::OffloadedOptimizer",
                            optim_state::PartRule::kIfWritten);
    optim_state::load_checked<optim_state::StateOf<O>, optim_state::OptionsOf<O>>(
        *this, "cadre::OffloadedOptimizer", {}, [&] { O::load(archive); });
    for (const auto& group : this->param_groups()) {
      for (const at::Tensor& parameter : group.params()) move_state(parameter);
    }
  }

 private:
  // Takes the parameters out of the optimizer's groups, so that step() can put them back one by
  // one. The destructor restores the groups.
  class EmptyGroups {
   public:
    explicit EmptyGroups(O& optimizer) : optimizer_(optimizer) {
      for (auto& group : optimizer.param_groups()) {
        parameters_.push_back(std::exchange(group.params(), {}));
      }
    }
    ~EmptyGroups() {
      for (size_t i = 0; i < parameters_.size(); ++i) {
        optimizer_.param_groups()[i].params() = std::move(parameters_[i]);
      }
    }
    EmptyGroups(const EmptyGroups&) = delete;
    EmptyGroups& operator=(const EmptyGroups&) = delete;

    const std::vector<std::vector<at::Tensor>>& parameters() const { return parameters_; }

   private:
    O& optimizer_;
    std::vector<std::vector<at::Tensor>> parameters_;  // one list for each group
  };

  void check_parameters() const {
    size_t index = 0;
    for (const auto& group : this->param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        optim_state::check_can_be_in_file(parameter, {"cadre::OffloadedOptimizer", index++, {}});
      }
    }
  }

  void move_state(const at::Tensor& parameter) {
    const auto found = this->state().find(parameter.unsafeGetTensorImpl());
    if (found == this->state().end() || found->second == nullptr) return;
    optim_state::visit_state_tensors(
        static_cast<optim_state::StateOf<O>&>(*found->second),
        [&parameter](const char*, auto& tensor) { tensor = moved_beside(parameter, tensor); });
  }
};

}  // namespace cadre
