#include "cadre/train/trainer/config/config_fields.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "cadre/core/base/format.h"
#include "cadre/core/base/nearest.h"
#include "cadre/core/schedule/generate.h"

namespace cadre::train {
namespace {

constexpr size_t kMaxComparedKey = 100;  // longer than every key

void add_model_fields(std::vector<ConfigField>& fields, ModelConfig& model) {
  fields.push_back({.name = "model.kind",
                    .meaning = "gpt: a transformer for text; mlp: a perceptron over the last "
                               "model.window tokens of text or over an image; cnn: the network of "
                               "PyTorch's MNIST example, for images",
                    .value = &model.kind,
                    .choices = {"gpt", "mlp", "cnn"}});
  fields.push_back({"model.layers", "number of blocks of the gpt, or of hidden layers of the mlp",
                    &model.layers, 1, 1000});
  fields.push_back({"model.heads", "number of attention heads of the gpt; must divide model.width",
                    &model.heads, 1, 1024});
  fields.push_back({"model.width",
                    "number of features of a token, and of each hidden layer of the mlp",
                    &model.width, 1, 65536});
  fields.push_back({"model.context",
                    "number of tokens of one sample; attention sees at most so many",
                    &model.context, 1, 1 << 20});
  fields.push_back({"model.window",
                    "number of preceding tokens from which the mlp predicts the next one",
                    &model.window, 1, 65536});
  fields.push_back(
      {"model.dropout",
       "cnn only: use dropout of 0.25 after the convolutions and of 0.5 before the last layer",
       &model.dropout});
  fields.push_back({"model.dropout_rate",
                    "gpt only: the probability with which an element of the embeddings, or of the "
                    "output of attention and MLP, is dropped; the dropped elements are the same on "
                    "any number of processes and under every strategy",
                    &model.dropout_rate, 0, 0.9999999});
  fields.push_back({"model.tied",
                    "gpt only: true: the output layer uses the weight of the token embedding; "
                    "false: it has a weight of its own",
                    &model.tied});
  fields.push_back({"model.experts",
                    "gpt only: the number of experts that replace the MLP of each block; a router "
                    "chooses some of them for each token; 0: one MLP for all tokens",
                    &model.experts, 0, 65536});
  fields.push_back(
      {"model.experts_per_token",
       "gpt with experts: how many experts process a token; their outputs are weighted by the "
       "router's probabilities, which are normalized to a sum of 1 if there are several",
       &model.experts_per_token, 1, 65536});
  fields.push_back(
      {"model.capacity_factor",
       "gpt with experts: in training, an expert processes at most this factor times the mean "
       "number of tokens per expert in a step, and skips further tokens; 0: no limit",
       &model.capacity_factor, 0, 1e9});
  fields.push_back({"model.auxiliary_loss",
                    "gpt with experts: the weight of the load-balancing loss; the losses of the "
                    "routers of all blocks are added to the training loss; 0: none",
                    &model.auxiliary_loss, 0, 1e9});
  fields.push_back({.name = "model.checkpoint_activations",
                    .meaning =
                        "blocks: backward recomputes each block of the gpt, each hidden layer "
                        "of the mlp, or the convolutions of the cnn, so that their "
                        "activations are not kept; results are bitwise equal",
                    .value = &model.checkpoint_activations,
                    .choices = {"none", "blocks"}});
  fields.push_back({"model.weights",
                    "initial parameters: a safetensors file, or the folder of a snapshot; empty: "
                    "random values from run.seed",
                    &model.weights});
}

void add_data_fields(std::vector<ConfigField>& fields, DataConfig& data) {
  fields.push_back({.name = "data.kind",
                    .meaning = "text; mnist: images in MNIST's file format; synthetic: generated "
                               "images of noise in ten classes",
                    .value = &data.kind,
                    .choices = {"text", "mnist", "synthetic"}});
  fields.push_back({.name = "data.path",
                    .meaning = "of text: a text file, a folder of them, or python-stdlib: the "
                               "source files of python3's standard library; of mnist: the folder "
                               "of the idx files, plain or .gz",
                    .value = &data.path,
                    .may_be_empty = false});
  fields.push_back(
      {"data.suffixes",
       "if data.path is a folder: read only files whose names end in one of these; []: all files",
       &data.suffixes});
  fields.push_back({"data.skipped_folders",
                    "names of folders that are skipped, at any depth below data.path",
                    &data.skipped_folders});
  fields.push_back({"data.held_out",
                    "the fraction of the data, at its end, that is used for evaluation only; if an "
                    "mnist folder has train and t10k files, t10k is held out instead",
                    &data.held_out, 0.001, 0.5});
  fields.push_back(
      {"data.samples", "synthetic data only: the number of images", &data.samples, 2, 1 << 20});
  fields.push_back({"data.threads",
                    "number of threads of each process that fetch batches ahead; 0: each batch is "
                    "fetched when it is needed",
                    &data.threads, 0, 256});
}

void add_optimizer_fields(std::vector<ConfigField>& fields, OptimizerConfig& optimizer) {
  fields.push_back({.name = "optimizer.kind",
                    .meaning = "the optimizer",
                    .value = &optimizer.kind,
                    .choices = {"adamw", "adam", "sgd", "adagrad", "rmsprop", "adadelta"}});
  fields.push_back({"optimizer.learning_rate",
                    "the largest learning rate, reached after the warm-up",
                    &optimizer.learning_rate, 0, 100});
  fields.push_back({"optimizer.beta1", "adam and adamw: decay of the running mean of gradients",
                    &optimizer.beta1, 0, 0.9999999});
  fields.push_back({"optimizer.beta2",
                    "adam and adamw: decay of the running mean of squared gradients",
                    &optimizer.beta2, 0, 0.9999999});
  fields.push_back(
      {"optimizer.epsilon",
       "all kinds except sgd: the number that is added to the denominator of the update",
       &optimizer.epsilon, 0, 1});
  fields.push_back({"optimizer.alpha", "rmsprop: decay of the running mean of squared gradients",
                    &optimizer.alpha, 0, 0.9999999});
  fields.push_back({"optimizer.rho",
                    "adadelta: decay of the running means of squared gradients and squared updates",
                    &optimizer.rho, 0, 0.9999999});
  fields.push_back({"optimizer.rate_decay",
                    "adagrad: the learning rate of step n is divided by 1 + (n - 1) * rate_decay",
                    &optimizer.rate_decay, 0, 1});
  fields.push_back(
      {"optimizer.momentum", "sgd and rmsprop: momentum", &optimizer.momentum, 0, 0.9999999});
  fields.push_back({"optimizer.nesterov", "sgd: use Nesterov momentum", &optimizer.nesterov});
  fields.push_back({"optimizer.weight_decay",
                    "weight decay of matrices and filters, not of norms and biases; decoupled in "
                    "adamw, added to the gradients (L2) in the other kinds",
                    &optimizer.weight_decay, 0, 10});
  fields.push_back(
      {"optimizer.clip_norm",
       "gradients are scaled so that the norm of all of them together is at most this; 0: no limit",
       &optimizer.clip_norm, 0, 1e9});
}

void add_schedule_fields(std::vector<ConfigField>& fields, ScheduleConfig& schedule) {
  fields.push_back({.name = "schedule.kind",
                    .meaning = "how the learning rate changes after the warm-up",
                    .value = &schedule.kind,
                    .choices = {"cosine", "constant", "step"}});
  fields.push_back({"schedule.warmup_steps",
                    "number of steps in which the learning rate rises to its peak; -1: a tenth of "
                    "all steps, at most 50",
                    &schedule.warmup_steps, -1, 1e9});
  fields.push_back({"schedule.final_fraction",
                    "cosine: the learning rate of the last step, as a fraction of the peak",
                    &schedule.final_fraction, 0, 1});
  fields.push_back({"schedule.step_size",
                    "step: the learning rate falls after every so many steps; 0: after each epoch",
                    &schedule.step_size, 0, 1e12});
  fields.push_back({"schedule.gamma", "step: the factor by which the learning rate falls",
                    &schedule.gamma, 0, 1});
}

void add_run_fields(std::vector<ConfigField>& fields, RunConfig& run) {
  fields.push_back(
      {"run.name", "the name of the run; its folder is run.folder/run.name", &run.name});
  fields.push_back({.name = "run.folder",
                    .meaning = "the folder that contains all runs; . is the current folder",
                    .value = &run.folder,
                    .may_be_empty = false});
  fields.push_back({"run.steps", "number of updates of the parameters", &run.steps, 1, 1e12});
  fields.push_back({"run.epochs",
                    "number of passes over the training data; replaces run.steps if above 0",
                    &run.epochs, 0, 1e9});
  fields.push_back({"run.global_batch_size",
                    "number of samples of all processes together in one update of the parameters; "
                    "a multiple of run.accumulate",
                    &run.global_batch_size, 1, 1 << 24});
  fields.push_back(
      {"run.accumulate",
       "number of parts into which each process splits its samples of a step, to save memory; it "
       "computes one part after the other and updates the parameters after the last",
       &run.accumulate, 1, 1 << 20});
  fields.push_back({.name = "run.autocast",
                    .meaning = "the dtype of matrix products and convolutions; parameters, their "
                               "gradients and the optimizer's state stay float32",
                    .value = &run.autocast,
                    .choices = {"float32", "bfloat16"}});
  fields.push_back(
      {.name = "run.device",
       .meaning = "where the model is trained: cpu; cuda: each process uses the CUDA device whose "
                  "number is its rank on the host, and processes share devices in turn if there "
                  "are fewer; auto: cuda if the host has CUDA devices, else cpu",
       .value = &run.device,
       .choices = {"auto", "cpu", "cuda"}});
  fields.push_back(
      {"run.seed",
       "the seed of the initial parameters, the order of samples and the generated text", &run.seed,
       0, 9e15});
  fields.push_back({"run.threads",
                    "number of threads of each process; more threads than cores are much slower",
                    &run.threads, 1, 1024});
  fields.push_back({"run.evaluate_every",
                    "number of steps between evaluations of the held-out loss; 0: only at the end",
                    &run.evaluate_every, 0, 1e12});
  fields.push_back({"run.evaluate_tokens", "number of held-out tokens that are evaluated",
                    &run.evaluate_tokens, 1, 1e12});
  fields.push_back({"run.snapshot_every", "number of steps between snapshots; 0: only at the end",
                    &run.snapshot_every, 0, 1e12});
  fields.push_back({"run.keep_best",
                    "write a snapshot whenever the held-out loss is the lowest so far, and name it "
                    "in the file best",
                    &run.keep_best});
  fields.push_back(
      {.name = "run.resume",
       .meaning = "none: start at step 0 (the folder of an earlier run is renamed); auto: resume "
                  "from the latest snapshot if there is one; best: resume from the snapshot that "
                  "the file best names; or the path of a snapshot",
       .value = &run.resume,
       .may_be_empty = false});
  fields.push_back(
      {.name = "run.recovery",
       .meaning = "what processes do when another one fails, with --max-restarts: restart: all are "
                  "started again, and resume from the latest snapshot; in_place: those that have "
                  "not failed keep running, and with ddp the run continues from the step that "
                  "they have in memory, otherwise from the latest snapshot",
       .value = &run.recovery,
       .choices = {"restart", "in_place"}});
}

void add_parallel_fields(std::vector<ConfigField>& fields, ParallelConfig& parallel) {
  fields.push_back(
      {.name = "parallel.strategy",
       .meaning = "what each process holds: single: everything, in a single process; ddp: "
                  "everything, in each process; zero1: a shard of the optimizer state, and the "
                  "rest whole; zero2: also only a shard of the gradients; fsdp: also only a shard "
                  "of the parameters; hsdp: as fsdp, within several groups of processes",
       .value = &parallel.strategy,
       .choices = {"single", "ddp", "zero1", "zero2", "fsdp", "hsdp"}});
  fields.push_back({"parallel.replicas",
                    "hsdp: the number of groups of processes, each of which holds the whole model; "
                    "must divide the number of processes; 0: as many as hosts, so that parameters "
                    "are gathered inside of hosts, or 2 on one host",
                    &parallel.replicas, 0, 1 << 20});
  fields.push_back(
      {.name = "parallel.form",
       .meaning = "fsdp and hsdp: gathered: each process copies the parameters of a block from the "
                  "others; mapped: the processes of a host read them in shared memory, which has "
                  "them once; between hosts they are always gathered; auto: mapped without "
                  "parallel.offload, else gathered",
       .value = &parallel.form,
       .choices = {"auto", "gathered", "mapped"}});
  fields.push_back(
      {.name = "parallel.reshard",
       .meaning = "fsdp and hsdp: when the gathered parameters of a block are freed; after_forward "
                  "needs the least memory, after_backward gathers them once less in each step",
       .value = &parallel.reshard,
       .choices = {"after_forward", "after_backward", "after_reduction"}});
  fields.push_back({.name = "parallel.offload",
                    .meaning = "fsdp and hsdp: a folder on a disk in which each process keeps its "
                               "shards of parameters, gradients and optimizer state, so that they "
                               "need not fit into memory; none: keep them in memory",
                    .value = &parallel.offload,
                    .may_be_empty = false});
  fields.push_back({.name = "parallel.parameter_dtype",
                    .meaning = "fsdp and hsdp: the dtype in which parameters are gathered and "
                               "used; the optimizer updates float32 parameters",
                    .value = &parallel.parameter_dtype,
                    .choices = {"float32", "bfloat16"}});
  fields.push_back({.name = "parallel.reduce_dtype",
                    .meaning = "fsdp and hsdp: the dtype in which gradients are reduced",
                    .value = &parallel.reduce_dtype,
                    .choices = {"float32", "bfloat16"}});
}

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (const PipelineScheduleInfo& info : pipeline_schedules()) names.emplace_back(info.name);
  return names;
}

void add_layout_fields(std::vector<ConfigField>& fields, ParallelConfig& parallel) {
  fields.push_back({"parallel.tensor",
                    "gpt only: the number of processes that divide the matrices of each layer, by "
                    "heads, hidden features and vocabulary; must divide model.heads. "
                    "parallel.strategy applies to the groups of processes that result",
                    &parallel.tensor, 1, 1024});
  fields.push_back({"parallel.sequence",
                    "with parallel.tensor: between the matrices, each of its processes has a part "
                    "of the tokens instead of all (sequence parallelism)",
                    &parallel.sequence});
  fields.push_back({"parallel.pipeline",
                    "gpt only: the number of processes that have different blocks and pass "
                    "microbatches to each other; with strategy single, ddp, fsdp or hsdp. pipeline "
                    "* virtual_stages must divide model.layers",
                    &parallel.pipeline, 1, 1024});
  fields.push_back(
      {.name = "parallel.schedule",
       .meaning =
           "with parallel.pipeline: the order of the computations of a step; see cadre schedule",
       .value = &parallel.schedule,
       .choices = schedule_names()});
  fields.push_back(
      {"parallel.microbatches",
       "with parallel.pipeline: the number of microbatches in which a pipeline computes its "
       "samples of a step; must divide the number of these samples; 0: a number that divides it "
       "and suits the schedule, at most four for each process of the pipeline",
       &parallel.microbatches, 0, 1 << 16});
  fields.push_back({"parallel.virtual_stages",
                    "with parallel.pipeline: the number of stages on each process; some schedules "
                    "require a certain number",
                    &parallel.virtual_stages, 1, 64});
  fields.push_back({"parallel.context",
                    "gpt only: the number of processes that have different tokens of the same "
                    "samples; twice the number must divide model.context",
                    &parallel.context, 1, 1024});
  fields.push_back(
      {.name = "parallel.attention",
       .meaning = "with parallel.context: ring: keys and values are passed around; all_to_all: "
                  "processes exchange tokens for heads; parallel.context must then divide the "
                  "heads that each process of parallel.tensor has",
       .value = &parallel.attention,
       .choices = {"ring", "all_to_all"}});
  fields.push_back({"parallel.expert",
                    "gpt with experts: the number of processes that divide the experts; each has "
                    "samples of its own; must divide model.experts",
                    &parallel.expert, 1, 65536});
}

void add_sample_fields(std::vector<ConfigField>& fields, SampleConfig& sample) {
  fields.push_back({"sample.tokens",
                    "the number of tokens of the text that is generated at the end; 0: none",
                    &sample.tokens, 0, 1e6});
  fields.push_back({"sample.prompt", "the beginning of the generated text", &sample.prompt});
  fields.push_back({"sample.temperature",
                    "0: always the most likely token; 1: the probabilities of the model; a smaller "
                    "number makes likely tokens likelier, and is at least 1e-30",
                    &sample.temperature, 0, 100});
  fields.push_back({"sample.top_k",
                    "each token is drawn from the top_k most likely ones; 0: from all",
                    &sample.top_k, 0, 1e6});
}

// Such a text is an error, because the operating system would end a path at the NUL and silently
// use another path.
constexpr const char* kHasNul = "must not contain the character NUL";

std::string check_text(const ConfigField& field, const std::string& text) {
  if (text.empty() && !field.may_be_empty) return "must not be empty";
  if (field.choices.empty()) {
    const bool is_generated_from =
        field.name == "sample.prompt";  // a prompt may be any bytes, because every byte is a token
    return text.find('\0') == std::string::npos || is_generated_from ? "" : kHasNul;
  }
  if (std::ranges::find(field.choices, text) != field.choices.end()) return "";
  std::string list;
  for (const std::string& choice : field.choices) list += (list.empty() ? "" : ", ") + choice;
  return cadre::format("must be one of {}, is {}", list, value_text(field));
}

// Checks texts that become parts of names of files and folders.
std::string check_texts(const std::vector<std::string>& texts) {
  for (const std::string& text : texts) {
    if (text.empty()) return "must not contain an empty text";
    if (text.find('\0') != std::string::npos) return kHasNul;
    if (text.find('/') != std::string::npos) {
      return cadre::format("has \"{}\", which no name of a file or folder contains", text);
    }
  }
  return "";
}

// Returns the shortest text that is parsed as the same number. JSON has neither infinity nor NaN.
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
  add_layout_fields(fields, config.parallel);
  add_sample_fields(fields, config.sample);
  return fields;
}

std::string check_value(const ConfigField& field) {
  if (const auto* text = std::get_if<std::string*>(&field.value)) return check_text(field, **text);
  if (const auto* texts = std::get_if<std::vector<std::string>*>(&field.value)) {
    return check_texts(**texts);
  }
  double value = 0;
  if (const auto* integer = std::get_if<int64_t*>(&field.value)) {
    value = static_cast<double>(**integer);
  } else if (const auto* real = std::get_if<double*>(&field.value)) {
    value = **real;
  } else {
    return "";
  }
  // The comparison is negated so that NaN, for which every comparison is false, is an error.
  if (field.min && !(value >= *field.min)) {
    return cadre::format("must be at least {}, is {}", *field.min, value_text(field));
  }
  if (field.max && !(value <= *field.max)) {
    return cadre::format("must be at most {}, is {}", *field.max, value_text(field));
  }
  return "";
}

// REQUIRES: the key allows the value; parse_config() has checked that.
DataStrategy data_strategy(const ParallelConfig& parallel) {
  return parse_data_strategy(parallel.strategy).value();
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

std::string nearest_key(const std::vector<ConfigField>& fields, std::string_view unknown) {
  unknown = unknown.substr(0, kMaxComparedKey);
  return std::ranges::min_element(
             fields, {},
             [&](const ConfigField& field) {
               // A known key in the wrong section, or without a section, is preferred to other
               // similar keys.
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
        // JSON strings, numbers, booleans and lists of strings are valid TOML.
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
