#include "cadre/tensor/optim/state_loading.h"

#include <c10/core/InferenceMode.h>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/group/caught_error.h"
#include "cadre/tensor/optim/fused_kernels.h"

namespace cadre::optim_state {
namespace {

ParameterPlace as_parameter_place(const Place& place) {
  return {place.optimizer, place.index, place.name};
}

std::string text_of(const Place& place) {
  return to_text(as_parameter_place(place));
}

[[noreturn]] void refuse_state(const Place& place, const std::string& sentence) {
  refuse_parameter(as_parameter_place(place), sentence);
}

}  // namespace

void check_closure_mode(std::string_view optimizer) {
  if (!c10::InferenceMode::is_enabled()) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: step(closure) was called in inference mode, in which autograd records "
                     "nothing, so the closure cannot compute gradients; call it outside of "
                     "c10::InferenceMode",
                     optimizer));
}

void load_archive(std::string_view optimizer, const std::function<void()>& load) {
  try {
    load();
  } catch (...) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: the archive is not the state of such an optimizer with the same "
                       "parameter groups: {}",
                       optimizer, caught_error().message()));
  }
}

void refuse_empty_state(const Place& place) {
  refuse_state(
      place, format("the state of {} is empty, as torch::load leaves it for one of two parameters "
                    "that were one tensor when the file was saved. Load a file of this "
                    "model, or erase the entry from the optimizer's state",
                    text_of(place)));
}

void check_needed(const at::Tensor& parameter, const at::Tensor& state, std::string_view state_name,
                  const Place& place) {
  const bool fits_elsewhere = state.defined() && state.device() != parameter.device() &&
                              state.sizes() == parameter.sizes() &&
                              state.scalar_type() == parameter.scalar_type();
  if (fits_elsewhere) return;  // the caller moves it to the parameter
  check_state(parameter, state, state_name, as_parameter_place(place));
}

void check_not_needed(const at::Tensor& state, std::string_view state_name, const Place& place) {
  if (!state.defined()) return;
  refuse_state(place, format("the state of {} has a {}, which an optimizer with these options does "
                             "not use. Load a state that was saved with the same options",
                             text_of(place), state_name));
}

void check_can_be_in_file(const at::Tensor& parameter, const Place& place) {
  if (parameter.is_cpu()) return;
  refuse_state(place, format("{} is on {}, and the state in a file is that of parameters that are "
                             "on the CPU. Use the optimizer itself, without OffloadedOptimizer",
                             text_of(place), parameter.device().str()));
}

void check_num_steps(int64_t num_steps, const Place& place) {
  if (num_steps >= 0) return;
  refuse_state(place, format("the state of {} counts {} steps; expected 0 or more", text_of(place),
                             num_steps));
}

}  // namespace cadre::optim_state
