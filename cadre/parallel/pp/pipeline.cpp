#include "cadre/parallel/pp/pipeline.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dot.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <set>

#include "cadre/base/fnv1a.h"
#include "cadre/base/format.h"
#include "cadre/parallel/pp/pipeline_agreement.h"
#include "cadre/parallel/pp/pipeline_executor.h"
#include "cadre/parallel/pp/pipeline_plan.h"
#include "cadre/parallel/pp/sharded_stages.h"
#include "cadre/parallel/pp/stage_records.h"

namespace cadre {
namespace {

using parallel::exchange_words;
using parallel::pipeline_refusal;

// Rows [first, last) of each microbatch: sizes differ by one at most.
std::vector<std::vector<at::Tensor>> cut(const std::vector<at::Tensor>& tensors,
                                         int num_microbatches) {
  std::vector<std::vector<at::Tensor>> microbatches(static_cast<size_t>(num_microbatches));
  for (int i = 0; i < num_microbatches; ++i) {
    for (const at::Tensor& tensor : tensors) {
      const int64_t rows = tensor.size(0);
      const int64_t begin = rows * i / num_microbatches;
      microbatches[i].push_back(tensor.slice(0, begin, rows * (i + 1) / num_microbatches));
    }
  }
  return microbatches;
}

// The ranks that hold the same stages, each with a batch of its own.
std::optional<ProcessGroup> replicas_of(const PipelineOptions& options) {
  if (!options.shards) return options.replicas;
  std::vector<std::string> names;
  for (const MeshAxis& axis : options.shards->axes()) names.push_back(axis.name);
  return options.shards->joint_group(names);
}

// In the order in which a step reduces their gradients.
std::unique_ptr<parallel::ShardedStages> shard_stages(const std::vector<PipelineStage>& stages,
                                                      const DeviceMesh& mesh,
                                                      const std::vector<PipelineAction>& actions) {
  std::vector<PipelineStage> in_order;
  for (const PipelineAction& action : actions) {
    if (action.kind != PipelineActionKind::kReduceGrad) continue;
    in_order.push_back(*std::ranges::find(stages, action.stage, &PipelineStage::stage));
  }
  return std::make_unique<parallel::ShardedStages>(mesh, in_order);
}

}  // namespace

class Pipeline::Core {
 public:
  // mesh: the axis of the pipeline, if it is known.
  Core(const std::vector<PipelineStage>& stages, const ProcessGroup& group,
       const std::optional<DeviceMesh>& mesh, const PipelineOptions& options,
       PipelineSchedule schedule)
      : group_(group),
        options_(options),
        replicas_(replicas_of(options)),
        schedule_(std::move(schedule)),
        holds_first_(schedule_.rank_of_stage.front() == group.rank()),
        holds_last_(schedule_.rank_of_stage.back() == group.rank()) {
    std::vector<PipelineStage> by_number = stages;
    std::ranges::sort(by_number, {}, &PipelineStage::stage);
    parallel::equalize_replicas(by_number, group, replicas_);
    if (options_.shards) {
      sharded_ = shard_stages(by_number, *options_.shards, schedule_.ranks[group.rank()]);
    }
    executor_.emplace(
        group, schedule_, by_number,
        parallel::PipelineExecutor::Options{.replicas = sharded_ ? std::nullopt : replicas_,
                                            .sharded = sharded_.get(),
                                            .before_microbatch = options.before_microbatch});
    records_.emplace(group, mesh, by_number, sharded_.get());
  }

  const PipelineSchedule& schedule() const { return schedule_; }
  const parallel::StageRecords& records() const { return *records_; }

  PipelineResult run(bool is_training, const PipelineBatch& batch, const PipelineBatch& target,
                     const PipelineLoss& loss, const PipelineStepOptions& options) {
    const Agreed agreed = agree(is_training, batch, target, loss);
    parallel::PipelineStep step{.is_training = is_training,
                                .has_headers = agreed.has_headers,
                                .keeps_outputs = options.return_outputs && holds_last_,
                                .num_rows = agreed.rows,
                                .loss = holds_last_ ? &loss : nullptr};
    const int count = schedule_.num_microbatches;
    if (holds_first_) step.batches = cut(batch.tensors(), count);
    if (holds_last_ && loss) step.targets = cut(target.tensors(), count);
    std::vector<double> shares;
    for (int i = 0; i < count; ++i) {
      const int64_t rows = agreed.rows * (i + 1) / count - agreed.rows * i / count;
      shares.push_back(static_cast<double>(rows) / static_cast<double>(agreed.rows));
      step.weights.push_back(static_cast<double>(rows) / static_cast<double>(agreed.total_rows));
    }
    // Sharded stages have the gradients of earlier steps in their shards.
    const bool sets_aside = is_training && !sharded_ && (replicas_ || !ties_.empty());
    if (sets_aside) {
      for (auto& [stage, runner] : executor_->runners()) runner.set_gradients_aside();
    }
    if (is_training && sharded_) sharded_->begin_step();
    parallel::PipelineExecutor::Output output = executor_->run(step);
    if (is_training) {
      for (const Tie& tie : ties_) tie.parameters.sum_gradients();
      if (sharded_) sharded_->finish_step();
    }
    if (sets_aside) {
      for (auto& [stage, runner] : executor_->runners()) runner.add_gradients_set_aside();
    }
    known_signatures_[is_training ? 1 : 0] = agreed.signature;
    return result_of(output, shares, agreed.has_loss, options);
  }

  void tie(const std::vector<parallel::StageParameter>& parameters) {
    parallel::TiedParameters::Holders holders;
    std::string text;
    const std::optional<Error> refusal = find_holders(parameters, holders, text);
    Fnv1a hash;
    hash.add(text);
    std::vector<int64_t> words{static_cast<int64_t>(hash.value()), -1, -1};
    if (!refusal && !holders.own.empty()) {
      words[1] = holders.own[0].numel();
      words[2] = static_cast<int64_t>(holders.own[0].scalar_type());
    }
    const auto all = exchange_words(group_, words, refusal, "parameters to tie");
    if (const auto other = parallel::first_unlike(all, 0)) {
      throw pipeline_refusal(
          format("ranks 0 and {} tie different parameters; pass the same list on all "
                 "ranks (rank {}: {})",
                 *other, group_.rank(), text));
    }
    for (const int rank : holders.ranks) {
      const auto& root = all[holders.root];
      if (all[rank][1] == root[1] && all[rank][2] == root[2]) continue;
      throw pipeline_refusal(
          format("the parameters to tie ({}) have {} elements on rank {} and {} on rank "
                 "{}, or another dtype",
                 text, root[1], holders.root, all[rank][1], rank));
    }
    const std::set<int> stages = stages_of(parameters);
    const parallel::WholeStages whole(sharded_.get(), stages);
    for (const at::Tensor& tensor : holders.own) {
      if (sharded_) sharded_->keep_whole(tensor);
    }
    ties_.push_back({text, stages, parallel::TiedParameters(group_, std::move(holders))});
    ties_.back().parameters.broadcast();
    if (sharded_) {
      for (const int stage : stages) sharded_->take_from_parameters(stage);
    }
    records_->tie(parameters);
  }

  void check_ties() const {
    std::vector<int64_t> differs;
    for (const Tie& tie : ties_) {
      const parallel::WholeStages whole(sharded_.get(), tie.stages);
      differs.push_back(tie.parameters.are_equal() ? 0 : 1);
    }
    const auto all = exchange_words(group_, differs, std::nullopt, "tied parameters");
    for (size_t i = 0; i < ties_.size(); ++i) {
      for (int rank = 0; rank < group_.world_size(); ++rank) {
        if (all[rank][i] == 0) continue;
        throw pipeline_refusal(
            format("the tied parameters {} differ: rank {} has other values than the "
                   "first of them; give them the same optimizer with the same options",
                   ties_[i].text, rank))
            .with_culprit(rank);
      }
    }
  }

 private:
  struct Tie {
    std::string text;
    std::set<int> stages;  // of this rank
    parallel::TiedParameters parameters;
  };
  // What all ranks know of a step.
  struct Agreed {
    int64_t rows = 0;
    int64_t total_rows = 0;  // of all replicas
    bool has_loss = false;
    bool has_headers = true;
    uint64_t signature = 0;
  };

  std::optional<Error> check_rows(const std::vector<at::Tensor>& tensors,
                                  std::string_view name) const {
    if (tensors.empty()) {
      return pipeline_refusal(format("the rank of the {} stage is given no {}",
                                     name == "batch" ? "first" : "last", name));
    }
    const int count = schedule_.num_microbatches;
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.defined() || tensor.dim() == 0) {
        return pipeline_refusal(
            format("a tensor of the {} has no rows; its first dimension is that of the "
                   "batch",
                   name));
      }
      const int64_t rows = tensor.size(0);
      if (rows != tensors[0].size(0)) {
        return pipeline_refusal(
            format("the tensors of the {} have {} and {} rows", name, tensors[0].size(0), rows));
      }
      if (rows < count || (rows % count != 0 && !options_.allow_uneven_microbatches)) {
        return pipeline_refusal(
            format("{} microbatches do not divide the {} rows of the {}; change the "
                   "batch's size{}",
                   count, rows, name, rows < count ? "" : ", or set allow_uneven_microbatches"));
      }
      if (tensor.requires_grad()) {
        return pipeline_refusal(
            format("a tensor of the {} requires grad; a pipeline computes gradients of "
                   "parameters only",
                   name));
      }
    }
    return std::nullopt;
  }

  std::optional<Error> check_arguments(bool is_training, const PipelineBatch& batch,
                                       const PipelineBatch& target,
                                       const PipelineLoss& loss) const {
    if (holds_first_) {
      if (auto error = check_rows(batch.tensors(), "batch")) return error;
    }
    if (!holds_last_) return std::nullopt;
    if (is_training && !loss) {
      return pipeline_refusal(
          format("this rank holds the last stage ({}) and is given no loss function",
                 schedule_.num_stages() - 1));
    }
    return loss ? check_rows(target.tensors(), "target") : std::nullopt;
  }

  // What the shapes of all messages follow from.
  uint64_t own_signature(const PipelineBatch& batch) {
    Fnv1a hash;
    if (holds_first_) {
      for (const at::Tensor& tensor : batch.tensors()) {
        hash.add(static_cast<uint64_t>(tensor.scalar_type()));
        hash.add(static_cast<uint64_t>(tensor.dim()));
        for (const int64_t size : tensor.sizes()) hash.add(static_cast<uint64_t>(size));
      }
    }
    for (const auto& [stage, runner] : executor_->runners()) {
      for (const NamedTensor& parameter : runner.stage().parameters()) {
        hash.add(parameter.tensor.requires_grad() ? 1 : 0);
      }
    }
    return hash.value();
  }

  Agreed agree(bool is_training, const PipelineBatch& batch, const PipelineBatch& target,
               const PipelineLoss& loss) {
    std::optional<Error> refusal = check_arguments(is_training, batch, target, loss);
    const auto rows_of = [](bool is_used, const PipelineBatch& tensors) {
      return is_used ? tensors.tensors()[0].size(0) : int64_t{-1};
    };
    std::vector<int64_t> words(5, 0);
    if (!refusal) {
      words = {is_training ? 1 : 0, rows_of(holds_first_, batch),
               rows_of(holds_last_ && loss, target), holds_last_ && loss ? 1 : 0,
               static_cast<int64_t>(own_signature(batch))};
    }
    Agreed agreed;
    try {
      const auto all = exchange_words(group_, words, refusal, "arguments of a step");
      agreed = compare(all);
    } catch (const Error& error) {
      // The ranks of other replicas wait for this one.
      if (!replicas_ || error.code() != ErrorCode::kInvalidArgument) throw;
      refusal = error;
    }
    agreed.total_rows = agreed.rows;
    if (replicas_) {
      const std::vector<int64_t> own{agreed.rows};
      agreed.total_rows = 0;
      for (const auto& of_replica :
           exchange_words(*replicas_, own, refusal, "arguments of a step")) {
        agreed.total_rows += of_replica[0];
      }
    }
    agreed.has_headers =
        options_.dynamic_shapes || known_signatures_[is_training ? 1 : 0] != agreed.signature;
    return agreed;
  }

  // The same on all ranks.
  Agreed compare(const std::vector<std::vector<int64_t>>& all) const {
    if (const auto other = parallel::first_unlike(all, 0)) {
      throw pipeline_refusal(format("rank 0 calls {} and rank {} {}; all ranks call the same",
                                    all[0][0] == 1 ? "step()" : "eval()", *other,
                                    all[*other][0] == 1 ? "step()" : "eval()"));
    }
    const auto& first = all[schedule_.rank_of_stage.front()];
    const auto& last = all[schedule_.rank_of_stage.back()];
    if (last[2] >= 0 && last[2] != first[1]) {
      throw pipeline_refusal(format("the batch has {} rows on rank {}, the target {} on rank {}",
                                    first[1], schedule_.rank_of_stage.front(), last[2],
                                    schedule_.rank_of_stage.back()));
    }
    Fnv1a hash;
    for (const auto& words : all) hash.add(static_cast<uint64_t>(words[4]));
    return {.rows = first[1], .has_loss = last[3] == 1, .signature = hash.value()};
  }

  PipelineResult result_of(parallel::PipelineExecutor::Output& output,
                           const std::vector<double>& shares, bool has_loss,
                           const PipelineStepOptions& options) const {
    const at::NoGradGuard no_grad;
    PipelineResult result{.losses = {},
                          .loss = {},
                          .outputs = {},
                          .peak_live_microbatches = output.peak_live_microbatches};
    if (has_loss && (holds_last_ || options.broadcast_losses)) {
      result.losses = at::empty({schedule_.num_microbatches}, at::kDouble);
      if (holds_last_) {
        auto* const values = result.losses.mutable_data_ptr<double>();
        for (size_t i = 0; i < output.losses.size(); ++i) {
          values[i] = output.losses[i].item().toDouble();
        }
      }
    }
    if (has_loss && options.broadcast_losses) {
      group_.broadcast(result.losses, {.root = schedule_.rank_of_stage.back()});
    }
    if (result.losses.defined()) {
      result.loss = at::dot(result.losses, at::tensor(shares, at::kDouble));
    }
    const size_t num_outputs = output.outputs.empty() ? 0 : output.outputs[0].size();
    for (size_t i = 0; i < num_outputs; ++i) {
      std::vector<at::Tensor> parts;
      for (const auto& of_microbatch : output.outputs) parts.push_back(of_microbatch.at(i));
      result.outputs.push_back(parts[0].dim() == 0 ? at::stack(parts) : at::cat(parts));
    }
    return result;
  }

  // Those of this rank.
  std::set<int> stages_of(const std::vector<parallel::StageParameter>& parameters) const {
    std::set<int> stages;
    for (const parallel::StageParameter& parameter : parameters) {
      if (schedule_.rank_of_stage[parameter.stage] == group_.rank()) stages.insert(parameter.stage);
    }
    return stages;
  }

  std::optional<Error> find_holders(const std::vector<parallel::StageParameter>& parameters,
                                    parallel::TiedParameters::Holders& holders, std::string& text) {
    std::set<int> ranks;
    for (const parallel::StageParameter& parameter : parameters) {
      text += format("{}{}:{}", text.empty() ? "" : ", ", parameter.stage, parameter.name);
      if (parameter.stage < 0 || parameter.stage >= schedule_.num_stages()) {
        return pipeline_refusal(
            format("cannot tie {}: there is no stage {}", parameter.name, parameter.stage));
      }
      ranks.insert(schedule_.rank_of_stage[parameter.stage]);
    }
    if (parameters.size() < 2) return pipeline_refusal("at least two parameters can be tied");
    holders.root = schedule_.rank_of_stage[parameters[0].stage];
    holders.ranks.assign(ranks.begin(), ranks.end());
    for (const parallel::StageParameter& parameter : parameters) {
      const auto runner = executor_->runners().find(parameter.stage);
      if (runner == executor_->runners().end()) continue;
      const auto& named = runner->second.stage().parameters();
      const auto found = std::ranges::find(named, parameter.name, &NamedTensor::name);
      if (found == named.end()) {
        return pipeline_refusal(format("cannot tie {}: stage {} has no parameter of this name",
                                       parameter.name, parameter.stage));
      }
      const bool is_there = std::ranges::any_of(
          holders.own, [&](const at::Tensor& other) { return other.is_same(found->tensor); });
      if (!is_there) holders.own.push_back(found->tensor);
    }
    for (const at::Tensor& tensor : holders.own) {
      if (tensor.sizes() == holders.own[0].sizes() &&
          tensor.scalar_type() == holders.own[0].scalar_type()) {
        continue;
      }
      return pipeline_refusal(format("cannot tie {}: the shapes or dtypes differ", text));
    }
    return std::nullopt;
  }

  ProcessGroup group_;
  PipelineOptions options_;
  std::optional<ProcessGroup> replicas_;
  PipelineSchedule schedule_;
  bool holds_first_;
  bool holds_last_;
  std::unique_ptr<parallel::ShardedStages> sharded_;  // null where ranks have whole stages
  std::optional<parallel::PipelineExecutor> executor_;
  std::optional<parallel::StageRecords> records_;
  std::vector<Tie> ties_;
  // Of the last step with headers: of evaluation and of training.
  std::optional<uint64_t> known_signatures_[2];
};

namespace {

const ProcessGroup& only_group(const DeviceMesh& mesh) {
  if (mesh.axes().size() != 1) {
    throw pipeline_refusal(
        format("the mesh {} has {} axes; a pipeline lies along one: mesh[\"pp\"]", mesh.to_string(),
               mesh.axes().size()));
  }
  return mesh.group(mesh.axes()[0].name);
}

}  // namespace

Pipeline::Pipeline(const std::vector<PipelineStage>& stages, const ProcessGroup& group,
                   const std::optional<DeviceMesh>& mesh, const PipelineOptions& options) {
  auto schedule = parallel::lowered_schedule(stages, options, group.world_size());
  parallel::check_schedules_match(group, schedule);
  parallel::check_stages_match(group, *schedule, stages);
  core_ = std::make_unique<Core>(stages, group, mesh, options, std::move(*schedule));
}

Pipeline::Pipeline(const std::vector<PipelineStage>& stages, const ProcessGroup& group,
                   const PipelineOptions& options)
    : Pipeline(stages, group, std::nullopt, options) {}

Pipeline::Pipeline(const std::vector<PipelineStage>& stages, const DeviceMesh& mesh,
                   const PipelineOptions& options)
    : Pipeline(stages, only_group(mesh), mesh, options) {}

Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;

PipelineResult Pipeline::step(const PipelineBatch& batch, const PipelineBatch& target,
                              const PipelineLoss& loss, const PipelineStepOptions& options) {
  return core_->run(true, batch, target, loss, options);
}

PipelineResult Pipeline::eval(const PipelineBatch& batch, const PipelineBatch& target,
                              const PipelineLoss& loss, const PipelineStepOptions& options) {
  return core_->run(false, batch, target, loss, options);
}

void Pipeline::tie_parameters(const std::vector<parallel::StageParameter>& parameters) {
  core_->tie(parameters);
}

void Pipeline::check_tied_parameters() const {
  core_->check_ties();
}

std::vector<at::Tensor> Pipeline::parameters() const {
  return core_->records().values();
}

std::vector<ParameterShard> Pipeline::parameter_shards() const {
  return core_->records().all();
}

const PipelineSchedule& Pipeline::schedule() const {
  return core_->schedule();
}

}  // namespace cadre
