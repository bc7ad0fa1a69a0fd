#include "cadre/train/training/training_division.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/tensor/group/agreement.h"

namespace cadre {
namespace {

using training_parts::kCall;

[[noreturn]] void refuse_options(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, format("{}: {}", kCall, what));
}

// What a program or CADRE_STRATEGY has chosen.
struct Words {
  std::optional<DataStrategy> strategy;
  ModelDegrees degrees;
  int* rest = nullptr;  // the degree that has no number
};

[[noreturn]] void refuse_word(const std::string& text, std::string_view word) {
  std::string names;
  for (const DataStrategy strategy : kDataStrategies) names += format("{}, ", to_string(strategy));
  refuse_options(
      format("{} is \"{}\", and \"{}\" in it is none of {}pipeline, context, tensor; an example is "
             "\"fsdp,tensor=2\"",
             kStrategyVariable, text, word, names));
}

// Adds a word of `text`.
void add_word(Words& words, const std::string& text, std::string_view word) {
  if (const auto strategy = parse_data_strategy(word); strategy && !words.strategy) {
    words.strategy = strategy;
    return;
  }
  const size_t equals = std::min(word.find('='), word.size());
  const std::string_view name = word.substr(0, equals);
  int* const degree = name == "tensor"     ? &words.degrees.tensor
                      : name == "context"  ? &words.degrees.context
                      : name == "pipeline" ? &words.degrees.pipeline
                                           : nullptr;
  if (degree == nullptr || *degree != 1) refuse_word(text, word);
  if (equals == word.size()) {
    if (words.rest != nullptr) refuse_word(text, word);
    words.rest = degree;
    return;
  }
  const std::string_view number = word.substr(equals + 1);
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), *degree);
  if (error != std::errc() || end != number.data() + number.size() || *degree < 1) {
    refuse_word(text, word);
  }
}

// Returns the number of ranks that have one copy of the model.
int64_t size_of(const ModelDegrees& degrees) {
  return int64_t{degrees.pipeline} * degrees.context * degrees.tensor;
}

void check_degrees(const ModelDegrees& degrees, int num_ranks) {
  // Each degree is at most the number of ranks before they are multiplied.
  for (const int degree : {degrees.pipeline, degrees.context, degrees.tensor}) {
    if (degree >= 1 && degree <= num_ranks) continue;
    refuse_options(
        format("the degree {} is not possible on {} ranks; choose 1 or more, such that "
               "the product of the degrees divides the number of ranks",
               degree, num_ranks));
  }
  const int64_t product = size_of(degrees);
  if (num_ranks % product == 0) return;
  refuse_options(
      format("a model with the degrees pipeline {}, context {} and tensor {} is on {} "
             "ranks, which do not divide {} ranks into equal groups; choose other "
             "degrees, or start a multiple of {} ranks",
             degrees.pipeline, degrees.context, degrees.tensor, product, num_ranks, product));
}

std::pair<DataStrategy, ModelDegrees> chosen(const TrainingOptions& options, int num_ranks) {
  Words words{.strategy = options.strategy, .degrees = options.degrees.value_or(ModelDegrees{})};
  const char* const value = std::getenv(kStrategyVariable);
  if (!options.strategy && value != nullptr && *value != '\0') {
    const std::string text = value;
    Words named;
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find(',', begin), text.size());
      add_word(named, text, std::string_view(text).substr(begin, end - begin));
      begin = end + 1;
    }
    if (named.rest != nullptr) {
      *named.rest = static_cast<int>(std::max<int64_t>(1, num_ranks / size_of(named.degrees)));
    }
    words.strategy = named.strategy;
    if (!options.degrees) words.degrees = named.degrees;
  }
  check_degrees(words.degrees, num_ranks);
  return {words.strategy.value_or(DataStrategy::kDdp), words.degrees};
}

void check_training_options(const TrainingOptions& options, DataStrategy strategy,
                            const ModelDegrees& degrees, const Ranks& ranks) {
  if (strategy == DataStrategy::kSingle && ranks.size() > 1) {
    refuse_options(
        format("the strategy is single, and there are {} ranks, each of which would train by "
               "itself: start one process, or choose ddp, zero1, zero2, fsdp or hsdp",
               ranks.size()));
  }
  if (options.num_parts < 1) {
    refuse_options(format("options.num_parts is {}; choose 1 or more", options.num_parts));
  }
  if (options.max_norm && !(*options.max_norm > 0)) {
    refuse_options(format("options.max_norm is {}; choose a number above 0, or leave it out",
                          *options.max_norm));
  }
  if (!options.fsdp.ignored.empty()) {
    refuse_options(
        "options.fsdp.ignored names parameters that no optimizer of a Training would update: make "
        "a FullyShardedDataParallel yourself, and an optimizer with a group for them");
  }
  if (options.ddp.comm_hook && has_units(strategy)) {
    refuse_options(
        format("options.ddp.comm_hook is set, and {} reduces gradients without hooks: leave it "
               "out, or choose ddp or zero1",
               to_string(strategy)));
  }
  if (degrees != ModelDegrees{} && ranks.mesh() && ranks.mesh()->axes().size() != 1) {
    refuse_options(
        format("the mesh {} was passed together with the degrees of a model, which need axes of "
               "their own; pass the group of all ranks",
               ranks.mesh()->to_string()));
  }
  if (options.weighting == GradientWeighting::kSum && degrees.context > 1) {
    refuse_options(
        "options.weighting is the sum, and with the degree context all ranks of a copy compute the "
        "whole loss, so the sum would count it several times; leave weighting as it is");
  }
  if (options.autocast && *options.autocast != at::kBFloat16 && *options.autocast != at::kHalf) {
    refuse_options(format("options.autocast is {}; choose BFloat16 or Half, or leave it out",
                          c10::toString(*options.autocast)));
  }
}

// Returns the number of groups of hsdp that each have the whole model.
int replicas_of(const TrainingOptions& options, const ProcessGroup& world, int num_ranks) {
  const int world_size = world.world_size();
  const std::vector<int> hosts = world.communicator().hosts();
  int num_replicas = options.num_replicas;
  if (num_replicas == 0) num_replicas = std::max(2, *std::ranges::max_element(hosts) + 1);
  if (num_replicas >= 1 && num_ranks % num_replicas == 0) return num_replicas;
  refuse_options(
      format("hsdp divides {} ranks into {} groups that each have the whole model, which is not "
             "possible; set options.num_replicas to a number that divides the ranks{}",
             num_ranks, num_replicas,
             num_ranks == world_size ? ", or pass a mesh of two axes (replicate, then shard)"
                                     : ", which are those of different copies of the model"));
}

// The ranks of a division with degrees. Neighbouring ranks differ in tensor, then in context, then
// in the rows, then in the layers.
struct Axes {
  std::optional<DeviceMesh> stages;
  DeviceMesh wrapped;
  std::optional<DeviceMesh> tensor;
  std::optional<ProcessGroup> context;
  std::optional<ProcessGroup> rows;
  std::optional<ProcessGroup> copy;
};

Ranks ranks_of_strategy(const TrainingOptions& options, DataStrategy strategy, const Ranks& ranks) {
  const bool has_two_axes = ranks.mesh() && ranks.mesh()->axes().size() == 2;
  if (strategy == DataStrategy::kHsdp && has_two_axes) return ranks;
  const ProcessGroup& world = ranks.group_of_one_axis(kCall, "dp");
  if (strategy != DataStrategy::kHsdp) return ranks;
  const int num_replicas = replicas_of(options, world, world.world_size());
  return DeviceMesh(world,
                    {{"replicate", num_replicas}, {"shard", world.world_size() / num_replicas}});
}

// Ranks with different tokens count as ranks with different rows for the strategy: it averages
// their gradients, or shards the parameters among them.
Axes axes_of(const TrainingOptions& options, DataStrategy strategy, const ModelDegrees& degrees,
             const Ranks& ranks) {
  const ProcessGroup& world = ranks.group_of_one_axis(kCall, "dp");
  const int wrapped = world.world_size() / (degrees.pipeline * degrees.tensor);
  std::vector<MeshAxis> axes = {{"pp", degrees.pipeline}};
  std::vector<std::string> names;
  if (strategy == DataStrategy::kHsdp) {
    const int num_replicas = replicas_of(options, world, wrapped);
    axes.push_back({"replicate", num_replicas});
    axes.push_back({"shard", wrapped / num_replicas});
    names = {"replicate", "shard"};
  } else {
    axes.push_back({"dp", wrapped});
    names = {"dp"};
  }
  axes.push_back({"tp", degrees.tensor});
  const DeviceMesh mesh(world, axes);
  Axes result{.wrapped = mesh.slice(names)};
  if (degrees.pipeline > 1) result.stages = mesh["pp"];
  if (degrees.tensor > 1) result.tensor = mesh["tp"];
  const DeviceMesh copies(world, {{"pp", degrees.pipeline},
                                  {"rows", wrapped / degrees.context},
                                  {"cp", degrees.context},
                                  {"tp", degrees.tensor}});
  if (degrees.context > 1) result.context = copies.group("cp");
  result.rows = copies.group("rows");
  result.copy = copies.joint_group({"pp", "cp", "tp"});
  return result;
}

}  // namespace

struct TrainingDivision::Choice {
  DataStrategy strategy = DataStrategy::kDdp;
  ModelDegrees degrees;
};

// Agrees with the other ranks on the options, which it checks.
TrainingDivision::Choice TrainingDivision::agreed(const TrainingOptions& options,
                                                  const Ranks& ranks) {
  Choice choice;
  const auto make_fields = [&]() -> std::vector<AgreedField> {
    std::tie(choice.strategy, choice.degrees) = chosen(options, ranks.size());
    check_training_options(options, choice.strategy, choice.degrees, ranks);
    return {{"the strategy", std::string(to_string(choice.strategy))},
            {"the degree pipeline", format("{}", choice.degrees.pipeline)},
            {"the degree context", format("{}", choice.degrees.context)},
            {"the degree tensor", format("{}", choice.degrees.tensor)},
            {"options.schedule", options.schedule},
            {"options.context_form", std::string(to_string(options.context_form))},
            {"options.num_replicas", format("{}", options.num_replicas)},
            {"options.num_parts", format("{}", options.num_parts)},
            {"options.weighting", std::string(to_string(options.weighting))},
            {"options.max_norm", options.max_norm ? format("{}", *options.max_norm) : "unset"},
            {"options.autocast", options.autocast ? c10::toString(*options.autocast) : "unset"}};
  };
  check_equal_on_all_ranks(
      ranks.group(), kCall, make_fields,
      "pass the same options on all ranks, and start all hosts with the same CADRE_STRATEGY");
  return choice;
}

TrainingDivision::TrainingDivision(const Ranks& ranks, const TrainingOptions& options)
    : TrainingDivision(ranks, options, agreed(options, ranks)) {}

TrainingDivision::TrainingDivision(const Ranks& ranks, const TrainingOptions& options,
                                   const Choice& choice)
    : strategy_(choice.strategy), degrees_(choice.degrees), world_(ranks.group()), wrapped_(ranks) {
  if (degrees_ == ModelDegrees{}) {
    wrapped_ = ranks_of_strategy(options, strategy_, ranks);
    return;
  }
  Axes axes = axes_of(options, strategy_, degrees_, ranks);
  wrapped_ = axes.wrapped;
  stages_ = std::move(axes.stages);
  rows_ = std::move(axes.rows);
  copy_ = std::move(axes.copy);
  context_ = std::move(axes.context);
  tensor_ = std::move(axes.tensor);
}

std::string TrainingDivision::name() const {
  std::string name(to_string(strategy_));
  if (degrees_.pipeline > 1) name += format(", pipeline {}", degrees_.pipeline);
  if (degrees_.context > 1) name += format(", context {}", degrees_.context);
  if (degrees_.tensor > 1) name += format(", tensor {}", degrees_.tensor);
  return name;
}

std::vector<ProcessGroup> TrainingDivision::groups_of_axes() const {
  std::vector<ProcessGroup> groups;
  const size_t num_axes =
      (wrapped_.mesh() ? wrapped_.mesh()->axes().size() : 1) + (tensor_ ? 1 : 0);
  if (num_axes < 2) return groups;
  if (stages_) groups.push_back(stages_->group("pp"));
  for (const MeshAxis& axis : wrapped_.mesh()->axes()) {
    groups.push_back(wrapped_.mesh()->group(axis.name));
  }
  if (tensor_) groups.push_back(tensor_->group("tp"));
  return groups;
}

}  // namespace cadre
