#include "cadre/tensor/optim/optimizer_options.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <typeinfo>
#include <utility>

#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/optim/optimizers.h"
#include "cadre/tensor/optim/state_tensors.h"

namespace cadre::optim_state {
namespace {

// Returns the value with all digits, so that options that differ have different texts.
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

std::string type_name(const torch::optim::OptimizerOptions& options) {
  return c10::demangle(typeid(options).name());
}

std::string text_of_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  const at::Tensor values = tensor.detach().cpu().contiguous();
  const std::string_view bytes(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  return format("a {} tensor {} with the digest {:016x}", c10::toString(values.scalar_type()),
                list_of(values.sizes()), fnv1a(bytes));
}

std::string text_of_value(const c10::IValue& value) {
  const auto text_of_list = [](c10::ArrayRef<c10::IValue> elements) {
    std::string text = "(";
    for (const c10::IValue& element : elements) {
      text += format("{}{}", text.size() == 1 ? "" : ", ", text_of_value(element));
    }
    return text + ")";
  };
  if (value.isDouble()) return exact(value.toDouble());
  if (value.isInt()) return format("{}", value.toInt());
  if (value.isBool()) return value.toBool() ? "true" : "false";
  if (value.isString()) return format("\"{}\"", value.toStringRef());
  if (value.isTensor()) return text_of_tensor(value.toTensor());
  if (value.isTuple()) return text_of_list(value.toTupleRef().elements());
  if (value.isList()) return text_of_list(value.toListRef());
  return c10::str(value);
}

struct Field {
  std::string name;
  std::string value;
};

void add_fields_of(torch::serialize::InputArchive& archive, const std::string& prefix,
                   std::vector<Field>& fields) {
  for (const std::string& key : archive.keys()) {
    c10::IValue value;
    archive.read(key, value);
    if (!value.isModule()) {
      fields.push_back({prefix + key, text_of_value(value)});
      continue;
    }
    torch::serialize::InputArchive nested;
    archive.read(key, nested);
    add_fields_of(nested, format("{}{}.", prefix, key), fields);
  }
}

// Returns the fields that `serialize` writes; nullopt if the class has no serialize(). Saves the
// archive to memory and reads it back, because an OutputArchive cannot list its fields.
template <typename Serialize>
std::optional<std::vector<Field>> fields_written_by(const Serialize& serialize) {
  try {
    torch::serialize::OutputArchive written;
    serialize(written);
    std::string bytes;
    written.save_to([&bytes](const void* data, size_t size) {
      bytes.append(static_cast<const char*>(data), size);
      return size;
    });
    torch::serialize::InputArchive archive;
    archive.load_from(bytes.data(), bytes.size());
    std::vector<Field> fields;
    add_fields_of(archive, "", fields);
    return fields;
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

std::optional<std::vector<Field>> serialized_fields(const torch::optim::OptimizerOptions& options) {
  return fields_written_by(
      [&options](torch::serialize::OutputArchive& archive) { options.serialize(archive); });
}

struct OptionsText {
  std::string text;
  bool is_whole;  // false if the class may have fields that `text` lacks
};

OptionsText with_fields(std::string text, const std::vector<Field>& fields, bool is_whole) {
  for (const auto& [name, value] : fields) text += format(", {} {}", name, value);
  return {std::move(text), is_whole};
}

OptionsText text_of_other(const torch::optim::OptimizerOptions& options) {
  const std::string type = type_name(options);
  if (const auto fields = serialized_fields(options)) return with_fields(type, *fields, true);
  try {
    return {format("{}, lr {}", type, exact(options.get_lr())), false};
  } catch (const c10::Error&) {
    return {type, false};  // the class has no learning rate
  }
}

// Returns the text of options whose class is Known, or is derived from Known. `text` has the fields
// of Known; the additional fields that a derived class writes in its own serialize() are appended.
template <typename Known>
OptionsText text_of_known(const Known& options, std::string text) {
  if (typeid(options) == typeid(Known)) return {std::move(text), true};
  text = format("{}, {}", type_name(options), text);
  std::optional<std::vector<Field>> fields = serialized_fields(options);
  const std::optional<std::vector<Field>> known = fields_written_by(
      [&options](torch::serialize::OutputArchive& archive) { options.Known::serialize(archive); });
  if (!fields || !known) return {std::move(text), false};
  std::erase_if(*fields, [&known](const Field& field) {
    return std::ranges::find(*known, field.name, &Field::name) != known->end();
  });
  const bool is_whole = !fields->empty();
  return with_fields(std::move(text), *fields, is_whole);
}

OptionsText describe(const torch::optim::OptimizerOptions& options) {
  if (const auto* adamw = dynamic_cast<const torch::optim::AdamWOptions*>(&options)) {
    return text_of_known(*adamw, text_of_adam(*adamw));
  }
  if (const auto* adam = dynamic_cast<const torch::optim::AdamOptions*>(&options)) {
    return text_of_known(*adam, text_of_adam(*adam));
  }
  if (const auto* sgd = dynamic_cast<const torch::optim::SGDOptions*>(&options)) {
    return text_of_known(*sgd,
                         format("lr {}, momentum {}, dampening {}, weight decay {}, nesterov {}",
                                exact(sgd->lr()), exact(sgd->momentum()), exact(sgd->dampening()),
                                exact(sgd->weight_decay()), sgd->nesterov()));
  }
  if (const auto* rmsprop = dynamic_cast<const torch::optim::RMSpropOptions*>(&options)) {
    return text_of_known(
        *rmsprop,
        format("lr {}, alpha {}, eps {}, weight decay {}, momentum {}, centered {}",
               exact(rmsprop->lr()), exact(rmsprop->alpha()), exact(rmsprop->eps()),
               exact(rmsprop->weight_decay()), exact(rmsprop->momentum()), rmsprop->centered()));
  }
  if (const auto* adagrad = dynamic_cast<const torch::optim::AdagradOptions*>(&options)) {
    return text_of_known(
        *adagrad,
        format("lr {}, lr decay {}, weight decay {}, initial accumulator value {}, eps {}",
               exact(adagrad->lr()), exact(adagrad->lr_decay()), exact(adagrad->weight_decay()),
               exact(adagrad->initial_accumulator_value()), exact(adagrad->eps())));
  }
  if (const auto* adadelta = dynamic_cast<const AdadeltaOptions*>(&options)) {
    return text_of_known(
        *adadelta,
        format("lr {}, rho {}, eps {}, weight decay {}", exact(adadelta->lr()),
               exact(adadelta->rho()), exact(adadelta->eps()), exact(adadelta->weight_decay())));
  }
  return text_of_other(options);
}

std::string text_of_state_mark(int64_t mark) {
  if (mark == 0) return "none";
  int num_tensors = -1;  // the first one bit of a mark stands for no tensor, so it is not counted
  for (int64_t bits = mark % kStepsOfMark; bits != 0; bits /= 2) num_tensors += bits % 2;
  return format("that of step {}, with {} tensors", mark / kStepsOfMark, num_tensors);
}

// The parameters of a group that have a common name on all ranks, and the group's options.
struct CommonGroup {
  struct Parameter {
    std::string name;
    const at::Tensor* tensor;
  };
  std::vector<Parameter> parameters;
  const torch::optim::OptimizerOptions* options;  // null if there are none
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
  return describe(options).text;
}

bool has_whole_text(const torch::optim::OptimizerOptions& options) {
  return describe(options).is_whole;
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
  } else if (dynamic_cast<const AdadeltaOptions*>(&options) != nullptr) {
    needed = {"square_avg", "acc_delta"};
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

void UncomparedOptions::warn(LogSink& log, std::string_view component, const GroupTerms& terms) {
  const auto is_known = [&](const torch::optim::OptimizerParamGroup& group) {
    const auto* options = group.has_options() ? &group.options() : terms.defaults;
    return options == nullptr || known_.contains(typeid(*options));
  };
  // The common case: all classes of options were examined in the first step.
  if (std::ranges::all_of(terms.groups, is_known)) return;
  const auto examine = [&](const torch::optim::OptimizerOptions* options) {
    if (options == nullptr || !known_.emplace(typeid(*options)).second) return;
    if (has_whole_text(*options)) return;
    log.write(LogLevel::kWarning, component,
              format("options are not compared between the ranks class=\"{}\" compared=\"{}\" "
                     "effect=\"ranks that differ in other fields of this class are not noticed; "
                     "give it a serialize(torch::serialize::OutputArchive&) const that writes "
                     "them\"",
                     type_name(*options), text_of(*options)));
  };
  for (const CommonGroup& group : common_groups(terms)) examine(group.options);
}

}  // namespace cadre::optim_state
