#include "cadre/optim/optimizer_options.h"

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
#include <utility>

#include "cadre/base/fnv1a.h"
#include "cadre/base/format.h"
#include "cadre/optim/state_tensors.h"

namespace cadre::optim_state {
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

std::string text_of_state_mark(int64_t mark) {
  if (mark == 0) return "none";
  int num_tensors = -1;  // the first bit is no tensor's
  for (int64_t bits = mark % kStepsOfMark; bits != 0; bits /= 2) num_tensors += bits % 2;
  return format("that of step {}, with {} tensors", mark / kStepsOfMark, num_tensors);
}

// What the ranks have in common of a group.
struct CommonGroup {
  struct Parameter {
    std::string name;
    const at::Tensor* tensor;
  };
  std::vector<Parameter> parameters;
  const torch::optim::OptimizerOptions* options;  // null where nothing says them
};

std::vector<CommonGroup> common_groups(const GroupTerms& terms) {
  std::vector<CommonGroup> groups;
  for (const torch::optim::OptimizerParamGroup& group : terms.groups) {
    CommonGroup common{.parameters = {},
                       .options = group.has_options() ? &group.options() : terms.defaults};
    for (const at::Tensor& parameter : group.params()) {
      std::string name = terms.name_of(parameter);
      if (!name.empty()) common.parameters.push_back({std::move(name), &parameter});
    }
    if (!common.parameters.empty() || group.params().empty()) groups.push_back(std::move(common));
  }
  return groups;
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

void add_fields_of(const GroupTerms& terms, std::vector<AgreedField>& fields) {
  const std::vector<CommonGroup> groups = common_groups(terms);
  fields.push_back({"the number of parameter groups", format("{}", groups.size())});
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& [parameters, options] = groups[g];
    fields.push_back(
        {format("the number of parameters of group {}", g), format("{}", parameters.size())});
    for (size_t i = 0; i < parameters.size(); ++i) {
      fields.push_back(
          {format("parameter {} of group {}", i, g), format("\"{}\"", parameters[i].name)});
    }
    if (options != nullptr) {
      fields.push_back(
          {format("the set of options of group {}", g), format("({})", text_of(*options))});
    }
    if (!terms.state_mark_of) continue;
    for (const auto& [name, parameter] : parameters) {
      fields.push_back({format("the state of \"{}\"", name),
                        text_of_state_mark(terms.state_mark_of(*parameter))});
    }
  }
}

uint64_t digest_of(const GroupTerms& terms) {
  Fnv1a digest;
  for (const auto& [parameters, options] : common_groups(terms)) {
    digest.add(parameters.size());
    if (options != nullptr) digest.add(text_of(*options));
    for (const auto& [name, parameter] : parameters) {
      digest.add(name);
      if (terms.state_mark_of) digest.add(static_cast<uint64_t>(terms.state_mark_of(*parameter)));
    }
  }
  return digest.value();
}

}  // namespace cadre::optim_state
