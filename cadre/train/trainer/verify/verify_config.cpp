#include "cadre/train/trainer/verify/verify_config.h"

#include <ATen/Parallel.h>
#include <torch/nn/utils/clip_grad.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/os/files/durable_file.h"
#include "cadre/parallel/shard/gather_shards.h"
#include "cadre/train/trainer/config/common_error.h"
#include "cadre/train/trainer/config/schedule.h"
#include "cadre/train/trainer/run/run_setup.h"
#include "cadre/train/trainer/strategy/device_support.h"
#include "cadre/train/trainer/strategy/optimizer.h"
#include "cadre/train/trainer/strategy/strategy.h"
#include "cadre/train/trainer/verify/layout_cases.h"
#include "cadre/train/verify/trainings.h"
#include "cadre/train/verify/verification.h"

namespace cadre::train {
namespace {

// Reads the batches of a run one after the other, over as many epochs as needed.
class Batches {
 public:
  Batches(std::shared_ptr<const Task> task, std::unique_ptr<DataLoader> loader,
          const at::TensorOptions& place)
      : task_(std::move(task)), loader_(std::move(loader)), place_(place) {}

  Batch next() {
    const Batch batch = next_batch();
    task_->check_data();
    const Batch cast = verify::cast_batch(batch, c10::typeMetaToScalarType(place_.dtype()));
    return {.data = cast.data.to(place_.device()), .target = cast.target.to(place_.device())};
  }
  // Returns which rows of the last batch belong to a rank; see rows_of_rank().
  SampledRows rows(int64_t step, const DataRanks& ranks) const {
    return rows_of_rank(*loader_, step, ranks);
  }

 private:
  Batch next_batch() {
    if (next_) {
      ++*next_;
    } else {
      next_.emplace(loader_->epoch(epoch_).begin());
    }
    if (*next_ == std::default_sentinel) next_.emplace(loader_->epoch(++epoch_).begin());
    return **next_;
  }

  std::shared_ptr<const Task> task_;
  std::unique_ptr<DataLoader> loader_;
  at::TensorOptions place_;  // the dtype and the device of the batches
  int64_t epoch_ = 0;
  std::optional<DataLoader::Epoch::Iterator> next_;
};

// The settings that are common to all trainings of a verification.
struct VerifiedRun {
  Config config;
  at::ScalarType dtype;
  c10::Device device;
  std::shared_ptr<const Task> task;

  std::shared_ptr<Model> make_model() const {
    std::shared_ptr<Model> model = make_initial_model(config, *task);
    model->to(device, dtype);
    return model;
  }
  Batches batches(const std::optional<ProcessGroup>& group) const {
    return {task, make_training_loader(config, *task, group),
            at::TensorOptions(dtype).device(device)};
  }
  double learning_rate(int64_t step) const {
    return learning_rate_at(step, config.run.steps, config.optimizer, config.schedule);
  }
  // Returns the maximum norm of the gradients; infinity if they are not clipped.
  double clip_norm() const {
    const double limit = config.optimizer.clip_norm;
    return limit > 0 ? limit : std::numeric_limits<double>::infinity();
  }
};

class PlainUpdates final : public verify::UpdateRule {
 public:
  PlainUpdates(std::shared_ptr<const VerifiedRun> run, const std::vector<NamedTensor>& parameters)
      : run_(std::move(run)), optimizer_(make_optimizer(parameters, run_->config.optimizer)) {}
  void update(int64_t step) override {
    set_learning_rate(*optimizer_, run_->learning_rate(step));
    optimizer_->step();
  }

 private:
  std::shared_ptr<const VerifiedRun> run_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

class PlainRun final : public verify::ReferenceTraining {
 public:
  explicit PlainRun(std::shared_ptr<const VerifiedRun> run)
      : run_(std::move(run)),
        model_(run_->make_model()),
        batches_(run_->batches(std::nullopt)),
        updates_(run_, verify::whole_parameters(*model_)) {}

  double backward(int64_t step) override {
    model_->zero_grad();
    const Batch batch = batches_.next();
    model_->set_rows(batches_.rows(step, {}));
    const at::Tensor output = model_->forward(batch.data);
    const at::Tensor loss = with_auxiliary_loss(run_->task->loss(output, batch.target), *model_);
    loss.backward();
    const double limit = run_->clip_norm();
    if (std::isfinite(limit)) torch::nn::utils::clip_grad_norm_(model_->parameters(), limit);
    return loss.item<double>();
  }
  std::vector<NamedTensor> gradients() override { return verify::whole_gradients(*model_); }
  void update(int64_t step) override { updates_.update(step); }
  std::vector<NamedTensor> parameters() override { return verify::whole_parameters(*model_); }
  std::unique_ptr<verify::UpdateRule> rule_for(
      const std::vector<NamedTensor>& parameters) override {
    return std::make_unique<PlainUpdates>(run_, parameters);
  }

 private:
  std::shared_ptr<const VerifiedRun> run_;
  std::shared_ptr<Model> model_;
  Batches batches_;
  PlainUpdates updates_;
};

// Computes a step exactly as the trainer does.
class StrategyRun final : public verify::SteppedTraining {
 public:
  // `world` is the group of the case.
  StrategyRun(std::shared_ptr<const VerifiedRun> run, const ProcessGroup& world,
              const StrategyCase& strategy, os::System& system)
      : run_(std::move(run)),
        world_(world),
        system_(system),
        num_parts_(strategy.num_parts),
        config_(config_of(run_->config, strategy)),
        layout_(lay_out(config_, world, run_->device)),
        model_(run_->make_model()),
        sizes_(sizes_of(*model_)),
        batches_(run_->batches(layout_.data.group)),
        strategy_(make_strategy(config_, model_, layout_, std::nullopt)) {}

  double backward(int64_t step) override {
    strategy_->optimizer().zero_grad();
    const Batch batch = batches_.next();
    ScalarSum loss = strategy_->backward(
        *run_->task, batch, {.num_parts = num_parts_, .rows = batches_.rows(step, layout_.data)});
    (void)strategy_->clip_gradients(run_->clip_norm());
    return verify::mean_over_rows(loss.value(system_), batch.data.size(0), world_);
  }
  std::vector<NamedTensor> gradients() override {
    const std::vector<ParameterShard> shards = strategy_->gradient_shards();
    if (shards.empty()) return verify::whole_gradients(*model_);
    return in_plain_shapes(shard::gather_gradients(shards, world_));
  }
  void update(int64_t step) override { strategy_->step(run_->learning_rate(step)); }
  std::vector<NamedTensor> parameters() override {
    if (strategy_->has_whole_model()) return verify::whole_parameters(*model_);
    return in_plain_shapes(shard::gather_values(strategy_->gradient_shards()));
  }
  void close() override {
    if (layout_.mesh) layout_.mesh->close();
  }

 private:
  using Sizes = std::map<std::string, std::vector<int64_t>>;

  static Sizes sizes_of(const Model& model) {
    Sizes sizes;
    for (const auto& item : model.named_parameters()) {
      sizes[item.key()] = item.value().sizes().vec();
    }
    return sizes;
  }
  std::vector<NamedTensor> in_plain_shapes(std::vector<NamedTensor> named) const {
    for (NamedTensor& parameter : named) {
      parameter.tensor = parameter.tensor.reshape(sizes_.at(parameter.name));
    }
    return named;
  }

  std::shared_ptr<const VerifiedRun> run_;
  ProcessGroup world_;
  os::System& system_;
  int64_t num_parts_;
  Config config_;
  RunLayout layout_;
  std::shared_ptr<Model> model_;
  Sizes sizes_;  // the sizes in the plain model
  Batches batches_;
  std::unique_ptr<Strategy> strategy_;
};

// Switches off options with which several ranks cannot equal one process, or whose rounding would
// hide defects. Returns a remark for each.
std::vector<std::string> make_comparable(Config& config) {
  std::vector<std::string> remarks;
  if (config.model.kind == "cnn" && config.model.dropout) {
    config.model.dropout = false;
    remarks.emplace_back("without dropout, which draws different random numbers on each process");
  }
  const ParallelConfig plain;
  if (config.run.autocast != "float32" || config.parallel.parameter_dtype != "float32" ||
      config.parallel.reduce_dtype != "float32") {
    config.run.autocast = "float32";
    config.parallel.parameter_dtype = plain.parameter_dtype;
    config.parallel.reduce_dtype = plain.reduce_dtype;
    remarks.emplace_back("without bfloat16, whose rounding would hide defects");
  }
  return remarks;
}

// Returns the number of parts into which the cases with gradient accumulation divide a batch. A
// model with experts has no such cases; the result is 1 then.
int64_t num_parts_of(const Config& config) {
  return config.model.experts > 0 ? 1 : std::max<int64_t>(2, config.run.accumulate);
}

struct Prepared {
  std::shared_ptr<const VerifiedRun> run;
  std::vector<StrategyCase> cases;
  int num_not_selected = 0;
  std::vector<ImpossibleLayout> impossible;
  int64_t num_steps = 0;
  std::vector<std::string> remarks;

  std::string why_not(const StrategyCase& strategy) const {
    const auto found = std::ranges::find(impossible, strategy, &ImpossibleLayout::strategy);
    if (found != impossible.end()) return found->reason;
    return problem_on(config_of(run->config, strategy), run->device);
  }
};

// Selects the cases that the words of the request name. A layout that this configuration cannot run
// is included in the report if it is the configuration's own, or if a word is its whole name.
void select_cases(Prepared& prepared, const VerifyRequest& request, int world_size) {
  const Config& config = prepared.run->config;
  LayoutCases layouts = layout_cases(config, world_size);
  std::vector<StrategyCase> cases = all_strategy_cases(
      {.world_size = world_size, .num_parts = num_parts_of(config), .has_group_reshard = false});
  const auto add = [&cases](const StrategyCase& strategy) {
    if (std::ranges::find(cases, strategy) == cases.end()) cases.push_back(strategy);
  };
  for (const StrategyCase& layout : layouts.possible) add(layout);
  for (const ImpossibleLayout& layout : layouts.impossible) {
    if (layout.is_own) add(layout.strategy);
  }
  const size_t num_usual = cases.size();
  for (const ImpossibleLayout& layout : layouts.impossible) {
    const std::string name = name_of(layout.strategy, world_size);
    const auto& words = request.strategies;
    if (std::ranges::find(words, name) != words.end()) add(layout.strategy);
  }
  prepared.cases = select_strategy_cases(cases, request.strategies, world_size);
  const auto num_selected =
      std::ranges::count_if(std::span(cases).first(num_usual), [&](const StrategyCase& usual) {
        return std::ranges::find(prepared.cases, usual) != prepared.cases.end();
      });
  prepared.num_not_selected = static_cast<int>(num_usual) - static_cast<int>(num_selected);
  prepared.impossible = std::move(layouts.impossible);
}

Prepared prepare(const Config& config, const VerifyRequest& request, const VerifyContext& context) {
  Prepared prepared;
  Config comparable = config;
  prepared.remarks = make_comparable(comparable);
  auto task = open_task(comparable, context.system.deadline_in(kTextSourceTimeout));
  auto run = std::make_shared<VerifiedRun>(
      VerifiedRun{.config = std::move(comparable),
                  .dtype = request.dtype == "float64" ? at::kDouble : at::kFloat,
                  .device = context.device,
                  .task = std::move(task)});
  const int world_size = context.world.world_size();
  check_global_batch_size(run->config, *run->task, world_size);
  resolve_epochs(run->config, *run->task);
  prepared.num_steps = std::min(request.num_steps, run->config.run.steps);
  prepared.run = std::move(run);
  select_cases(prepared, request, world_size);
  return prepared;
}

// Returns the layouts that would be possible after a small change. Returns an empty list if the
// request names its cases.
std::vector<NearCase> near_cases(const Prepared& prepared, const VerifyRequest& request,
                                 int world_size) {
  std::vector<NearCase> near;
  if (!request.strategies.empty()) return near;
  for (const ImpossibleLayout& layout : prepared.impossible) {
    if (layout.is_own || layout.change.empty()) continue;
    near.push_back({.strategy = name_of(layout.strategy, world_size),
                    .reason = layout.reason,
                    .change = layout.change});
  }
  return near;
}

// Returns the names of the layouts, such as "ddp/pp-2, fsdp/pp-2/tp-2", grouped by the change that
// they need.
std::string near_text(const VerifyReport& report) {
  std::map<std::string, std::string> names;
  for (const NearCase& near : report.near) {
    std::string& list = names[near.change];
    list += (list.empty() ? "" : ", ") + near.strategy;
  }
  std::string text;
  for (const auto& [change, list] : names) {
    text += cadre::format("  with {}: {}\n", change, list);
  }
  return text.empty() ? text
                      : "Layouts that are not among them, and the change that they need:\n" + text;
}

std::string conclusion(const VerifyReport& report, const VerifyRequest& request) {
  const auto count = report.strategies.size();
  const auto num_not_run = static_cast<size_t>(std::ranges::count_if(
      report.strategies, [](const StrategyReport& strategy) { return !strategy.not_run.empty(); }));
  const auto num_within =
      static_cast<size_t>(std::ranges::count_if(report.strategies, &StrategyReport::is_within));
  const size_t num_wrong = count - num_not_run - num_within;
  std::string text =
      num_wrong == 0
          ? cadre::format("{} of {} strategies train as one process does\n", num_within, count)
          : cadre::format("{} of {} strategies do not train as one process does\n", num_wrong,
                          count);
  if (num_wrong > 0 && request.dtype == "float32") {
    text +=
        "  --dtype float64 distinguishes rounding from defects: rounding is a billion times "
        "smaller "
        "there\n";
  }
  if (num_not_run > 0) text += cadre::format("{} of {} could not be run\n", num_not_run, count);
  if (report.num_not_selected > 0) {
    text += cadre::format("{} more were not selected by --strategies\n", report.num_not_selected);
  }
  if (report.world_size == 1) {
    text += "One process divides nothing: verify with --nproc-per-node 2 or more\n";
  }
  return text + near_text(report);
}

void introduce(const Prepared& prepared, const VerifyRequest& request,
               const VerifyContext& context) {
  if (context.world.rank() != 0) return;
  const Config& config = prepared.run->config;
  context.print(cadre::format("{} of {} parameters on {}; {} steps of {} samples in {}\n",
                              config.model.kind, num_parameters(*prepared.run->make_model()),
                              prepared.run->task->data_text(), prepared.num_steps,
                              config.run.global_batch_size, request.dtype));
  for (const std::string& remark : prepared.remarks) {
    context.print(cadre::format("  {}\n", remark));
  }
}

void write_json(const std::string& path, const std::string& text) {
  const ConstBytes bytes = std::as_bytes(std::span(text));
  const Status written = os::write_file(path, {&bytes, 1});
  if (!written.ok()) throw written.error().with_context("--json");
}

nlohmann::json json_of(const Deviation& deviation) {
  nlohmann::json json = {{"difference", deviation.difference},
                         {"bound", deviation.bound},
                         {"step", deviation.step},
                         {"rank", deviation.rank}};
  if (!deviation.name.empty()) json["name"] = deviation.name;
  return json;
}

}  // namespace

std::string json_of(const VerifyReport& report, const VerifyRequest& request) {
  nlohmann::json strategies = nlohmann::json::array();
  for (const StrategyReport& strategy : report.strategies) {
    nlohmann::json entry = {{"strategy", strategy.strategy}};
    if (!strategy.not_run.empty()) {
      entry["verdict"] = "not run";
      entry["reason"] = strategy.not_run;
    } else if (!strategy.error.empty()) {
      entry["verdict"] = "failed";
      entry["error"] = strategy.error;
    } else {
      entry["verdict"] = strategy.is_within() ? "within" : "deviates";
      entry["loss"] = json_of(strategy.loss);
      entry["gradients"] = json_of(strategy.gradients);
      entry["parameters"] = json_of(strategy.parameters);
    }
    strategies.push_back(std::move(entry));
  }
  nlohmann::json near = nlohmann::json::array();
  for (const NearCase& layout : report.near) {
    near.push_back(
        {{"strategy", layout.strategy}, {"reason", layout.reason}, {"change", layout.change}});
  }
  const nlohmann::json json = {{"world_size", report.world_size},
                               {"num_steps", report.num_steps},
                               {"dtype", request.dtype},
                               {"is_within", report.is_within()},
                               {"num_not_selected", report.num_not_selected},
                               {"strategies", std::move(strategies)},
                               {"near", std::move(near)}};
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

VerifyReport verify_config(const Config& config, const VerifyRequest& request,
                           const VerifyContext& context) {
  at::set_num_threads(static_cast<int>(config.run.threads));
  const bool is_first = context.world.rank() == 0;
  Prepared prepared;
  on_all_ranks(context.world, [&] {
    prepared = prepare(config, request, context);
    introduce(prepared, request, context);
  });
  VerificationOptions options{.num_steps = prepared.num_steps};
  options.progress = [&](std::string_view line) { context.print(cadre::format("  {}\n", line)); };
  VerifyReport report;
  try {
    report = run_verification(
        context.world,
        {.make_reference =
             [&](const ProcessGroup&) { return std::make_unique<PlainRun>(prepared.run); },
         .make_training =
             [&](const StrategyCase& strategy, const ProcessGroup& group) {
               return std::make_unique<StrategyRun>(prepared.run, group, strategy, context.system);
             },
         .why_not = [&](const StrategyCase& strategy) { return prepared.why_not(strategy); }},
        prepared.cases, options);
    report.num_not_selected = prepared.num_not_selected;
    report.near = near_cases(prepared, request, context.world.world_size());
  } catch (const Error& error) {
    // These errors are equal on all ranks, so they become CommonErrors; failures of the group are
    // not equal.
    if (error.code() == ErrorCode::kInvalidArgument) throw CommonError(error);
    throw;
  }
  on_all_ranks(context.world, [&] {
    if (!is_first) return;
    context.print(cadre::format("\n{}\n{}", report.to_text(), conclusion(report, request)));
    if (!request.json_path.empty()) write_json(request.json_path, json_of(report, request));
  });
  return report;
}

}  // namespace cadre::train
