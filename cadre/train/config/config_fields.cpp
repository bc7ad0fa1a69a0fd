#include "cadre/train/config/config_fields.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "cadre/base/format.h"

namespace cadre::train {
namespace {

// Levenshtein's: insertions, deletions and replacements.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, replaced}));
    }
  }
  return row.back();
}

void add_model_fields(std::vector<ConfigField>& fields, ModelConfig& model) {
  fields.push_back({.name = "model.kind",
                    .meaning = "gpt: a transformer, of text; mlp: a perceptron, over the last few "
                               "tokens of text or over an image; cnn: the MNIST network, of images",
                    .value = &model.kind,
                    .choices = {"gpt", "mlp", "cnn"}});
  fields.push_back(
      {"model.layers", "blocks of the gpt, hidden layers of the mlp", &model.layers, 1, 1000});
  fields.push_back(
      {"model.heads", "attention heads of the gpt; they divide the width", &model.heads, 1, 1024});
  fields.push_back({"model.width", "features of a token, and of each hidden layer of the mlp",
                    &model.width, 1, 65536});
  fields.push_back({"model.context", "tokens that one sample has, and the model sees at most",
                    &model.context, 1, 1 << 20});
  fields.push_back({"model.window", "tokens of text that the mlp sees", &model.window, 1, 65536});
  fields.push_back({"model.dropout",
                    "of the cnn: 0.25 behind the convolutions, 0.5 before the last layer",
                    &model.dropout});
  fields.push_back({.name = "model.checkpoint_activations",
                    .meaning = "blocks: backward computes each block of the gpt, each hidden layer "
                               "of the mlp, or the convolutions of the cnn a second time, so that "
                               "their activations need not be kept; the numbers are the same",
                    .value = &model.checkpoint_activations,
                    .choices = {"none", "blocks"}});
  fields.push_back({"model.weights",
                    "a safetensors file with the first values, or the folder of a snapshot; empty: "
                    "drawn from run.seed",
                    &model.weights});
}

void add_data_fields(std::vector<ConfigField>& fields, DataConfig& data) {
  fields.push_back({.name = "data.kind",
                    .meaning = "text; mnist: images in the files of MNIST; synthetic: images of "
                               "noise in ten classes, from a formula",
                    .value = &data.kind,
                    .choices = {"text", "mnist", "synthetic"}});
  fields.push_back({"data.path",
                    "a text file, a folder of them, or python-stdlib: the sources of the standard "
                    "library of python3; of mnist, the folder of the idx files, plain or .gz",
                    &data.path});
  fields.push_back(
      {"data.suffixes", "of a folder, only files whose names end so; [] for all", &data.suffixes});
  fields.push_back({"data.skipped_folders", "names of folders that are left out anywhere below",
                    &data.skipped_folders});
  fields.push_back({"data.held_out",
                    "share of the data, at its end, that is never trained on; an mnist folder with "
                    "train and t10k files holds out t10k instead",
                    &data.held_out, 0.001, 0.5});
  fields.push_back({"data.samples", "of synthetic: how many images", &data.samples, 2, 1 << 20});
  fields.push_back(
      {"data.threads",
       "threads of each process that fetch batches ahead; 0: none, each is fetched when "
       "it is wanted",
       &data.threads, 0, 256});
}

void add_optimizer_fields(std::vector<ConfigField>& fields, OptimizerConfig& optimizer) {
  fields.push_back({.name = "optimizer.kind",
                    .meaning = "the rule by which gradients change parameters",
                    .value = &optimizer.kind,
                    .choices = {"adamw", "adam", "sgd", "adagrad", "rmsprop", "adadelta"}});
  fields.push_back({"optimizer.learning_rate", "at its peak", &optimizer.learning_rate, 0, 100});
  fields.push_back({"optimizer.beta1", "of adam and adamw: memory of the gradient's mean",
                    &optimizer.beta1, 0, 0.9999999});
  fields.push_back({"optimizer.beta2", "of adam and adamw: memory of the gradient's square",
                    &optimizer.beta2, 0, 0.9999999});
  fields.push_back(
      {"optimizer.epsilon", "of all but sgd: added to the divisor", &optimizer.epsilon, 0, 1});
  fields.push_back({"optimizer.alpha", "of rmsprop: memory of the gradient's square",
                    &optimizer.alpha, 0, 0.9999999});
  fields.push_back(
      {"optimizer.rho", "of adadelta: memory of the squares", &optimizer.rho, 0, 0.9999999});
  fields.push_back({"optimizer.rate_decay",
                    "of adagrad: the rate of step n is divided by 1 + (n - 1) * rate_decay",
                    &optimizer.rate_decay, 0, 1});
  fields.push_back({"optimizer.momentum", "of sgd and rmsprop", &optimizer.momentum, 0, 0.9999999});
  fields.push_back({"optimizer.nesterov", "of sgd: look ahead", &optimizer.nesterov});
  fields.push_back(
      {"optimizer.weight_decay",
       "of matrices and filters; norms and biases do not decay; adamw takes it from the "
       "parameters, the others add it to the gradients",
       &optimizer.weight_decay, 0, 10});
  fields.push_back({"optimizer.clip_norm", "the norm of all gradients at most; 0: no limit",
                    &optimizer.clip_norm, 0, 1e9});
}

void add_schedule_fields(std::vector<ConfigField>& fields, ScheduleConfig& schedule) {
  fields.push_back({.name = "schedule.kind",
                    .meaning = "how the learning rate goes on after the warm-up",
                    .value = &schedule.kind,
                    .choices = {"cosine", "constant", "step"}});
  fields.push_back({"schedule.warmup_steps",
                    "steps in which it rises to its peak; -1: a tenth of all steps, at most 50",
                    &schedule.warmup_steps, -1, 1e9});
  fields.push_back({"schedule.final_fraction", "of cosine: of the peak, in the last step",
                    &schedule.final_fraction, 0, 1});
  fields.push_back({"schedule.step_size", "of step: steps between falls of the rate; 0: one epoch",
                    &schedule.step_size, 0, 1e12});
  fields.push_back(
      {"schedule.gamma", "of step: what a fall multiplies the rate by", &schedule.gamma, 0, 1});
}

void add_run_fields(std::vector<ConfigField>& fields, RunConfig& run) {
  fields.push_back({"run.name", "the run's folder is run.folder/run.name", &run.name});
  fields.push_back({"run.folder", "where runs are kept", &run.folder});
  fields.push_back({"run.steps", "updates of the parameters", &run.steps, 1, 1e12});
  fields.push_back({"run.epochs", "passes over the training data; above 0 they replace run.steps",
                    &run.epochs, 0, 1e9});
  fields.push_back({"run.batch_size", "samples of one step, of all processes together",
                    &run.batch_size, 1, 1 << 24});
  fields.push_back({"run.accumulate",
                    "parts that each process computes its share of a step in, one after the other, "
                    "to save memory",
                    &run.accumulate, 1, 1 << 20});
  fields.push_back({.name = "run.autocast",
                    .meaning = "the dtype of matrix products and convolutions; parameters, their "
                               "gradients and the optimizer's state stay float32",
                    .value = &run.autocast,
                    .choices = {"float32", "bfloat16"}});
  fields.push_back({"run.seed", "of the first parameters, the order of samples and the text sample",
                    &run.seed, 0, 9e15});
  fields.push_back({"run.threads",
                    "threads of each process; more than the cores there are is slower by far",
                    &run.threads, 1, 1024});
  fields.push_back({"run.evaluate_every", "steps between held-out losses; 0: at the end only",
                    &run.evaluate_every, 0, 1e12});
  fields.push_back({"run.evaluate_tokens", "held-out tokens that the loss is measured on",
                    &run.evaluate_tokens, 1, 1e12});
  fields.push_back({"run.snapshot_every", "steps between snapshots; 0: at the end only",
                    &run.snapshot_every, 0, 1e12});
  fields.push_back({"run.keep_best",
                    "a snapshot, named by the file best, whenever the held-out loss is the lowest "
                    "so far",
                    &run.keep_best});
  fields.push_back({"run.resume",
                    "none: start anew (an earlier run is moved aside); auto: go on from the latest "
                    "snapshot if there is one; best: from the best one; or the path of a snapshot",
                    &run.resume});
}

void add_parallel_fields(std::vector<ConfigField>& fields, ParallelConfig& parallel) {
  fields.push_back({.name = "parallel.strategy",
                    .meaning = "what each process holds of the model: single: all of it, and it is "
                               "the only process; ddp: all of it; zero1: a part of the optimizer's "
                               "state; zero2: and of the gradients; fsdp: and of the parameters; "
                               "hsdp: fsdp in several groups of processes",
                    .value = &parallel.strategy,
                    .choices = {"single", "ddp", "zero1", "zero2", "fsdp", "hsdp"}});
  fields.push_back({"parallel.replicas",
                    "of hsdp: groups of processes that hold the whole model each; they divide the "
                    "number of processes",
                    &parallel.replicas, 1, 1 << 20});
  fields.push_back({.name = "parallel.form",
                    .meaning = "of fsdp and hsdp: gathered: each process copies the parameters of "
                               "a block from the others; mapped: the processes of a host read them "
                               "in shared memory, which holds them once; between hosts they are "
                               "gathered in any case; auto: mapped without parallel.offload, else "
                               "gathered",
                    .value = &parallel.form,
                    .choices = {"auto", "gathered", "mapped"}});
  fields.push_back({.name = "parallel.reshard",
                    .meaning = "of fsdp and hsdp: until when the parameters of a block stay whole: "
                               "after_forward needs the least memory, after_backward gathers them "
                               "once less",
                    .value = &parallel.reshard,
                    .choices = {"after_forward", "after_backward", "after_reduction"}});
  fields.push_back({"parallel.offload",
                    "of fsdp and hsdp: a folder on a disk in which each process keeps its part of "
                    "the model, of gradients and of the optimizer's state, so that they need not "
                    "fit into memory; none: in memory",
                    &parallel.offload});
  fields.push_back({.name = "parallel.parameter_dtype",
                    .meaning = "of fsdp and hsdp: in which forward and backward compute; the "
                               "optimizer's parameters are float32",
                    .value = &parallel.parameter_dtype,
                    .choices = {"float32", "bfloat16"}});
  fields.push_back({.name = "parallel.reduce_dtype",
                    .meaning = "of fsdp and hsdp: in which gradients are added up",
                    .value = &parallel.reduce_dtype,
                    .choices = {"float32", "bfloat16"}});
}

void add_sample_fields(std::vector<ConfigField>& fields, SampleConfig& sample) {
  fields.push_back(
      {"sample.tokens", "length of the text written at the end; 0: none", &sample.tokens, 0, 1e6});
  fields.push_back({"sample.prompt", "what the text goes on from", &sample.prompt});
  fields.push_back({"sample.temperature", "0: always the likeliest token; 1: as the model says",
                    &sample.temperature, 0, 100});
  fields.push_back(
      {"sample.top_k", "draw among so many likeliest tokens; 0: among all", &sample.top_k, 0, 1e6});
}

// The shortest text that reads back as the same number; JSON has no word for what is none.
std::string number_text(double value) {
  return std::isfinite(value) ? nlohmann::json(value).dump() : cadre::format("{}", value);
}

}  // namespace

std::vector<ConfigField> config_fields(Config& config) {
  std::vector<ConfigField> fields;
  add_model_fields(fields, config.model);
  add_data_fields(fields, config.data);
  add_optimizer_fields(fields, config.optimizer);
  add_schedule_fields(fields, config.schedule);
  add_run_fields(fields, config.run);
  add_parallel_fields(fields, config.parallel);
  add_sample_fields(fields, config.sample);
  return fields;
}

std::string check_value(const ConfigField& field) {
  if (const auto* text = std::get_if<std::string*>(&field.value); text && !field.choices.empty()) {
    if (std::ranges::find(field.choices, **text) != field.choices.end()) return "";
    std::string list;
    for (const std::string& choice : field.choices) list += (list.empty() ? "" : ", ") + choice;
    return cadre::format("must be one of {}, is {}", list, value_text(field));
  }
  double value = 0;
  if (const auto* integer = std::get_if<int64_t*>(&field.value)) {
    value = static_cast<double>(**integer);
  } else if (const auto* real = std::get_if<double*>(&field.value)) {
    value = **real;
  } else {
    return "";
  }
  // Written so that NaN, which compares false with everything, is refused.
  if (field.min && !(value >= *field.min)) {
    return cadre::format("must be at least {}, is {}", *field.min, value_text(field));
  }
  if (field.max && !(value <= *field.max)) {
    return cadre::format("must be at most {}, is {}", *field.max, value_text(field));
  }
  return "";
}

ShardForm shard_form(const ParallelConfig& parallel) {
  const bool is_mapped =
      parallel.form == "mapped" || (parallel.form == "auto" && parallel.offload == "none");
  return is_mapped ? ShardForm::kMapped : ShardForm::kGathered;
}

OptimizerConfig default_optimizer(const std::string& kind) {
  OptimizerConfig config;
  config.kind = kind;
  if (kind == "adamw") return config;
  config.learning_rate = kind == "adadelta"                       ? 1.0
                         : kind == "adagrad" || kind == "rmsprop" ? 1e-2
                                                                  : 1e-3;
  config.beta2 = 0.999;
  config.epsilon = kind == "adagrad" ? 1e-10 : kind == "adadelta" ? 1e-6 : 1e-8;
  config.momentum = kind == "sgd" ? 0.9 : 0.0;
  config.weight_decay = 0;
  return config;
}

namespace {

std::optional<ConfigConflict> find_model_conflict(const Config& config) {
  const ModelConfig& model = config.model;
  const bool is_text = config.data.kind == "text";
  if (model.kind == "gpt" && !is_text) {
    return ConfigConflict{"data.kind",
                          cadre::format("must be text for model.kind gpt, which predicts the next "
                                        "token; {} has images: take model.kind cnn or mlp",
                                        config.data.kind)};
  }
  if (model.kind == "cnn" && is_text) {
    return ConfigConflict{"model.kind",
                          "cnn looks at images, and data.kind is text: take data.kind mnist or "
                          "synthetic, or model.kind gpt or mlp"};
  }
  if (config.data.kind == "mnist" && config.data.path == DataConfig().path) {
    return ConfigConflict{"data.kind", "mnist needs data.path: the folder of the idx files"};
  }
  if (model.kind == "gpt" && model.width % model.heads != 0) {
    return ConfigConflict{
        "model.heads", cadre::format("must divide model.width: {} heads cannot share {} features",
                                     model.heads, model.width)};
  }
  return std::nullopt;
}

// Keys that only save memory or time may be there under any strategy; these change the numbers.
std::optional<ConfigConflict> find_parallel_conflict(const ParallelConfig& parallel) {
  if (parallel.form == "mapped" && parallel.offload != "none") {
    return ConfigConflict{"parallel.form",
                          "is mapped, but parallel.offload keeps the parameters in files, which "
                          "are gathered: choose auto, or parallel.offload=none"};
  }
  if (parallel.strategy == "fsdp" || parallel.strategy == "hsdp") return std::nullopt;
  const std::array<std::pair<const char*, std::string>, 2> dtypes = {
      {{"parallel.parameter_dtype", parallel.parameter_dtype},
       {"parallel.reduce_dtype", parallel.reduce_dtype}}};
  for (const auto& [key, dtype] : dtypes) {
    if (dtype == "float32") continue;
    return ConfigConflict{
        key, cadre::format("is {}, which parallel.strategy fsdp and hsdp can do, and {} cannot: "
                           "choose one of those, or float32; run.autocast=bfloat16 computes in "
                           "bfloat16 under every strategy",
                           dtype, parallel.strategy)};
  }
  return std::nullopt;
}

}  // namespace

std::optional<ConfigConflict> find_conflict(const Config& config) {
  if (auto conflict = find_model_conflict(config)) return conflict;
  if (auto conflict = find_parallel_conflict(config.parallel)) return conflict;
  if (config.run.epochs == 0 && config.schedule.warmup_steps > config.run.steps) {
    return ConfigConflict{"schedule.warmup_steps",
                          cadre::format("is {}, more than run.steps, which is {}: set both, or "
                                        "schedule.warmup_steps=-1, which is a tenth of the steps",
                                        config.schedule.warmup_steps, config.run.steps)};
  }
  if (config.data.kind == "text" && config.run.evaluate_tokens <= config.model.context) {
    return ConfigConflict{
        "run.evaluate_tokens",
        cadre::format("is {}; one sample takes model.context + 1 tokens, which is {}",
                      config.run.evaluate_tokens, config.model.context + 1)};
  }
  const OptimizerConfig& optimizer = config.optimizer;
  if (optimizer.kind == "sgd" && optimizer.nesterov && optimizer.momentum == 0) {
    return ConfigConflict{"optimizer.nesterov", "needs optimizer.momentum above 0"};
  }
  const std::string& name = config.run.name;
  if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos) {
    return ConfigConflict{"run.name",
                          cadre::format("must be a plain folder name, is \"{}\"", name)};
  }
  return std::nullopt;
}

std::string nearest_key(const std::vector<ConfigField>& fields, std::string_view unknown) {
  return std::ranges::min_element(
             fields, {},
             [&](const ConfigField& field) {
               // A right key in the wrong section, or without one, is nearer than a chance
               // likeness.
               const std::string_view name = field.name;
               const std::string_view key = name.substr(name.find('.') + 1);
               const std::string_view unknown_key = unknown.substr(unknown.find('.') + 1);
               return std::min(edit_distance(name, unknown), edit_distance(key, unknown_key) + 1);
             })
      ->name;
}

std::string value_text(const ConfigField& field) {
  return std::visit(
      [](const auto* value) -> std::string {
        using Value = std::remove_cvref_t<decltype(*value)>;
        if constexpr (std::is_same_v<Value, double>) return number_text(*value);
        // A JSON text, number, truth value or list of texts is a TOML one, too.
        return nlohmann::json(*value).dump();
      },
      field.value);
}

std::string_view type_name(const ConfigField& field) {
  constexpr std::array<std::string_view, 5> kNames = {"an integer", "a number", "true or false",
                                                      "a text", "a list of texts"};
  return kNames[field.value.index()];
}

}  // namespace cadre::train
