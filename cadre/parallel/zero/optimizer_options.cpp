#include "cadre/parallel/zero/optimizer_options.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <charconv>
#include <typeinfo>

#include "cadre/base/format.h"

namespace cadre::parallel {
namespace {

// With all digits: options that differ have different texts.
std::string exact(double value) {
  char text[32];
  const auto end = std::to_chars(std::begin(text), std::end(text), value);
  return {text, end.ptr};
}

template <typename Options>
std::string text_of_adam(const Options& options) {
  const auto& [first, second] = options.betas();
  return format("lr {}, betas {} and {}, eps {}, weight decay {}, amsgrad {}", exact(options.lr()),
                exact(first), exact(second), exact(options.eps()), exact(options.weight_decay()),
                options.amsgrad());
}

std::string text_of_other(const torch::optim::OptimizerOptions& options) {
  const std::string type = c10::demangle(typeid(options).name());
  try {
    return format("{}, lr {}", type, exact(options.get_lr()));
  } catch (const c10::Error&) {
    return type;  // it has no learning rate
  }
}

}  // namespace

std::string text_of(const torch::optim::OptimizerOptions& options) {
  if (const auto* adamw = dynamic_cast<const torch::optim::AdamWOptions*>(&options)) {
    return text_of_adam(*adamw);
  }
  if (const auto* adam = dynamic_cast<const torch::optim::AdamOptions*>(&options)) {
    return text_of_adam(*adam);
  }
  if (const auto* sgd = dynamic_cast<const torch::optim::SGDOptions*>(&options)) {
    return format("lr {}, momentum {}, dampening {}, weight decay {}, nesterov {}",
                  exact(sgd->lr()), exact(sgd->momentum()), exact(sgd->dampening()),
                  exact(sgd->weight_decay()), sgd->nesterov());
  }
  if (const auto* rmsprop = dynamic_cast<const torch::optim::RMSpropOptions*>(&options)) {
    return format("lr {}, alpha {}, eps {}, weight decay {}, momentum {}, centered {}",
                  exact(rmsprop->lr()), exact(rmsprop->alpha()), exact(rmsprop->eps()),
                  exact(rmsprop->weight_decay()), exact(rmsprop->momentum()), rmsprop->centered());
  }
  if (const auto* adagrad = dynamic_cast<const torch::optim::AdagradOptions*>(&options)) {
    return format("lr {}, lr decay {}, weight decay {}, initial accumulator value {}, eps {}",
                  exact(adagrad->lr()), exact(adagrad->lr_decay()), exact(adagrad->weight_decay()),
                  exact(adagrad->initial_accumulator_value()), exact(adagrad->eps()));
  }
  return text_of_other(options);
}

std::vector<std::string> needed_state_of(const torch::optim::OptimizerOptions& options) {
  std::vector<std::string> needed;
  const auto of_adam = [&needed](bool amsgrad) {
    needed = {"exp_avg", "exp_avg_sq"};
    if (amsgrad) needed.emplace_back("max_exp_avg_sq");
  };
  if (const auto* adamw = dynamic_cast<const torch::optim::AdamWOptions*>(&options)) {
    of_adam(adamw->amsgrad());
  } else if (const auto* adam = dynamic_cast<const torch::optim::AdamOptions*>(&options)) {
    of_adam(adam->amsgrad());
  } else if (const auto* sgd = dynamic_cast<const torch::optim::SGDOptions*>(&options)) {
    if (sgd->momentum() != 0) needed = {"momentum_buffer"};
  } else if (const auto* rmsprop = dynamic_cast<const torch::optim::RMSpropOptions*>(&options)) {
    needed = {"square_avg"};
    if (rmsprop->momentum() > 0) needed.emplace_back("momentum_buffer");
    if (rmsprop->centered()) needed.emplace_back("grad_avg");
  } else if (dynamic_cast<const torch::optim::AdagradOptions*>(&options) != nullptr) {
    needed = {"sum"};
  }
  return needed;
}

void add_fields_of(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                   const torch::optim::OptimizerOptions* defaults,
                   const std::function<std::string(const at::Tensor&)>& name_of,
                   std::vector<AgreedField>& fields) {
  fields.push_back({"the number of parameter groups", format("{}", groups.size())});
  for (size_t g = 0; g < groups.size(); ++g) {
    const std::vector<at::Tensor>& parameters = groups[g].params();
    fields.push_back(
        {format("the number of parameters of group {}", g), format("{}", parameters.size())});
    for (size_t i = 0; i < parameters.size(); ++i) {
      fields.push_back(
          {format("parameter {} of group {}", i, g), format("\"{}\"", name_of(parameters[i]))});
    }
    const bool has_options = groups[g].has_options();
    if (!has_options && defaults == nullptr) continue;
    fields.push_back({format("the options of group {}", g),
                      format("({})", text_of(has_options ? groups[g].options() : *defaults))});
  }
}

}  // namespace cadre::parallel
