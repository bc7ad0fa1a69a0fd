#include "cadre/parallel/pp/pipeline.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/dot.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <chrono>

#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/pp/pipeline_agreement.h"
#include "cadre/parallel/pp/pipeline_executor.h"
#include "cadre/parallel/pp/sharded_stages.h"
#include "cadre/parallel/pp/stage_records.h"
#include "cadre/parallel/pp/tied_parameters.h"
#include "cadre/tensor/group/caught_error.h"
#include "cadre/tensor/group/messages/private_messages.h"
#include "cadre/tensor/hooks/shard_mark.h"

namespace cadre {
namespace {

using parallel::pipeline_refusal;

// Divides each tensor into microbatches along its rows; the numbers of rows differ by at most one.
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

// Shards the stages. The order of the stages is that in which a step reduces their gradients.
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

// The number of 64-bit words with which a rank describes its step to the other ranks, which compare
// them. The words of the tied parameters follow.
constexpr size_t kNumStepWords = 7;

bool has_valid_timeout(const PipelineStepOptions& options) {
  return !options.timeout || *options.timeout > Duration(0);
}

void check_timeout(const PipelineStepOptions& options) {
  if (has_valid_timeout(options)) return;
  throw pipeline_refusal(
      format("the timeout of the step is {} ms; pass a positive one, or leave it out for the "
             "group's",
             std::chrono::duration_cast<std::chrono::milliseconds>(*options.timeout).count()));
}

// An invalid timeout is not used for the exchange in which the ranks compare their arguments.
std::optional<Duration> timeout_of_agreement(const PipelineStepOptions& options) {
  return has_valid_timeout(options) ? options.timeout : std::nullopt;
}

std::string_view call_of(int64_t is_training) {
  return is_training == 1 ? "step()" : "forward()";
}

}  // namespace

class Pipeline::Core {
 public:
  Core(const std::vector<PipelineStage>& stages, parallel::AgreedSchedule agreed,
       const Ranks& ranks, const PipelineOptions& options)
      : ranks_(std::move(agreed.ranks)),
        options_(options),
        schedule_(std::move(agreed.schedule)),
        holds_first_(schedule_.rank_of_stage.front() == ranks_.group.rank()),
        holds_last_(schedule_.rank_of_stage.back() == ranks_.group.rank()) {
    std::vector<PipelineStage> by_number = stages;
    std::ranges::sort(by_number, {}, &PipelineStage::stage);
    const DeviceMesh own_mesh = ranks.mesh_with_axis("pp");
    if (options_.shards) shards_ = options_.shards->mesh_with_axis("shard");
    check_before_changes(by_number, own_mesh);
    const PrivateMessages messages(ranks_.group, "cadre::Pipeline");
    const PrivateMessages of_ties(ranks_.group, "cadre::Pipeline::tie_parameters");
    if (ranks_.replicas) {
      ranks_.group.communicator().fail_together(ranks_.replicas->communicator());
    }
    parallel::equalize_replicas(by_number, ranks_);
    if (shards_) shard(by_number, own_mesh);
    executor_.emplace(
        messages, schedule_, by_number,
        parallel::PipelineExecutor::Options{.replicas = sharded_ ? std::nullopt : ranks_.replicas,
                                            .sharded = sharded_.get(),
                                            .max_unsharded_stages = options.max_unsharded_stages,
                                            .before_microbatch = options.before_microbatch});
    mark_stages(by_number);
    ties_.emplace(ranks_, of_ties,
                  parallel::TiedParameters::Stages{.rank_of_stage = schedule_.rank_of_stage,
                                                   .own = by_number,
                                                   .sharded = sharded_.get(),
                                                   .records = &*records_});
  }

  const PipelineSchedule& schedule() const { return schedule_; }
  const parallel::StageRecords& records() const { return *records_; }
  parallel::TiedParameters& ties() { return *ties_; }

  PipelineResult run(bool is_training, const PipelineBatch& batch, const PipelineBatch& target,
                     const PipelineLoss& loss, const PipelineStepOptions& options) {
    const Agreed agreed = agree(is_training, batch, target, loss, options);
    parallel::PipelineStep step{.is_training = is_training,
                                .has_headers = agreed.has_headers,
                                .keeps_outputs = options.return_outputs && holds_last_,
                                .outputs_batch_dim = options.outputs_batch_dim,
                                .num_rows = agreed.rows,
                                .timeout = options.timeout,
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
    // The gradients of earlier steps are in the shards if stages are sharded, so they need not be
    // set aside.
    const bool sets_aside = is_training && !sharded_ && (ranks_.replicas || !ties_->is_empty());
    if (sets_aside) {
      for (auto& [stage, runner] : executor_->runners()) runner.set_gradients_aside();
    }
    if (is_training && sharded_) sharded_->begin_step();
    parallel::PipelineExecutor::Output output = executor_->run(step);
    if (is_training) {
      ties_->sum_gradients();
      if (sharded_) sharded_->finish_step();
    }
    if (sets_aside) {
      for (auto& [stage, runner] : executor_->runners()) runner.add_gradients_set_aside();
    }
    known_signatures_[is_training ? 1 : 0] = agreed.signature;
    return result_of(output, shares, agreed.has_loss, options);
  }

 private:
  // Marks the parameters, so that clip_grad_norm_() of a list of them throws: on several ranks the
  // norm of this rank's parameters is not that of the model.
  void mark_stages(const std::vector<PipelineStage>& stages) const {
    const int num_ranks = ranks_.group.world_size();
    if (num_ranks == 1) return;
    for (const PipelineStage& stage : stages) {
      for (const NamedTensor& parameter : stage.parameters()) {
        wrap::mark_as_of_stage(parameter.tensor, {.parameter = parameter.name,
                                                  .stage = stage.stage(),
                                                  .rank = ranks_.group.rank(),
                                                  .num_ranks = num_ranks});
      }
    }
  }

  // The properties of a step that were compared and are equal on all ranks.
  struct Agreed {
    int64_t rows = 0;
    int64_t total_rows = 0;  // the number of rows of all replicas
    bool has_loss = false;
    bool has_headers = true;
    uint64_t signature = 0;
    uint64_t trained = 0;  // a digest of the parameters' requires_grad and dtypes
  };

  // Checks for every error that the rest of the constructor could find, while the stages are still
  // unchanged. Throws on all ranks of all replicas.
  void check_before_changes(const std::vector<PipelineStage>& stages, const DeviceMesh& mesh) {
    const auto refusal = parallel::refusal_of([&] {
      records_.emplace(ranks_.group, mesh, stages, parallel::StageRecords::Form{.shards = shards_});
      parallel::StageMessages::check_num_messages(
          {schedule_.rank_of_stage, schedule_.num_microbatches});
    });
    parallel::agree_with_replicas(ranks_, {}, refusal);
    parallel::check_replicas(stages, ranks_);
  }

  // The ranks have already exchanged all errors about arguments. So an error here may occur on this
  // rank only, and the group is aborted to inform the other ranks.
  void shard(const std::vector<PipelineStage>& stages, const DeviceMesh& mesh) {
    try {
      sharded_ = shard_stages(stages, *shards_, schedule_.ranks[ranks_.group.rank()]);
      records_.emplace(ranks_.group, mesh, stages,
                       parallel::StageRecords::Form{.shards = shards_, .sharded = sharded_.get()});
    } catch (...) {
      ranks_.group.abort(format("sharding the stages of a pipeline: {}", caught_error().message()));
      throw;
    }
  }

  std::optional<Error> check_rows(const std::vector<at::Tensor>& tensors,
                                  std::string_view name) const {
    if (tensors.empty()) {
      return pipeline_refusal(format("the rank of the {} stage must be given the {}",
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
            format("the tensors of the {} have {} and {} rows, but all must have the same number",
                   name, tensors[0].size(0), rows));
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
    for (const auto& [stage, runner] : executor_->runners()) {
      if (const auto change = runner.changed_parameter()) {
        return pipeline_refusal(
            format("{} in the module of stage {} since the pipeline was constructed, so the "
                   "pipeline would neither reduce its gradient nor return it from parameters(); "
                   "change values in place, or construct the pipeline again",
                   *change, stage));
      }
    }
    if (is_training && sharded_) {
      if (const auto changed = sharded_->changed_parameter()) {
        return pipeline_refusal(format(
            "{}; with sharded stages the parameters that require grad must stay those of the "
            "construction: construct the modules and the pipeline again and load a snapshot",
            *changed));
      }
    }
    if (holds_first_) {
      if (auto error = check_rows(batch.tensors(), "batch")) return error;
    }
    if (!holds_last_) return std::nullopt;
    if (is_training && !loss) {
      return pipeline_refusal(
          format("this rank holds the last stage ({}), so it needs a loss function",
                 schedule_.num_stages() - 1));
    }
    return loss ? check_rows(target.tensors(), "target") : std::nullopt;
  }

  // Returns a digest of the dtypes and sizes of the batch, on the rank that has the first stage.
  // Together with own_trained() it determines the shapes of all messages.
  uint64_t own_signature(const PipelineBatch& batch) const {
    Fnv1a hash;
    if (holds_first_) {
      for (const at::Tensor& tensor : batch.tensors()) {
        hash.add(static_cast<uint64_t>(tensor.scalar_type()));
        hash.add(static_cast<uint64_t>(tensor.dim()));
        for (const int64_t size : tensor.sizes()) hash.add(static_cast<uint64_t>(size));
      }
    }
    return hash.value();
  }

  uint64_t own_trained() {
    Fnv1a hash;
    for (const auto& [stage, runner] : executor_->runners()) {
      for (const NamedTensor& parameter : runner.stage().parameters()) {
        hash.add(parameter.tensor.requires_grad() ? 1 : 0);
        hash.add(static_cast<uint64_t>(parameter.tensor.scalar_type()));
      }
    }
    return hash.value();
  }

  Agreed agree(bool is_training, const PipelineBatch& batch, const PipelineBatch& target,
               const PipelineLoss& loss, const PipelineStepOptions& options) {
    const auto rows_of = [](bool is_used, const PipelineBatch& tensors) {
      return is_used ? tensors.tensors()[0].size(0) : int64_t{-1};
    };
    const auto make_words = [&] {
      check_timeout(options);
      if (auto error = check_arguments(is_training, batch, target, loss)) throw *error;
      std::vector<int64_t> words = {is_training ? 1 : 0,
                                    rows_of(holds_first_, batch),
                                    rows_of(holds_last_ && loss, target),
                                    holds_last_ && loss ? 1 : 0,
                                    static_cast<int64_t>(own_signature(batch)),
                                    static_cast<int64_t>(own_trained()),
                                    options.broadcast_losses ? 1 : 0};
      for (const int64_t word : ties_->trained_words()) words.push_back(word);
      return words;
    };
    Agreed agreed;
    const std::optional<Error> refusal = parallel::refusal_of([&] {
      agreed = compare(gather_words(ranks_.group, parallel::kPipelineCall,
                                    kNumStepWords + ties_->num_trained_words(), make_words,
                                    timeout_of_agreement(options)));
    });
    // If there are replicas, the error is thrown later, because the ranks of the other replicas
    // wait for this rank in the next collective.
    if (refusal && !ranks_.replicas) throw *refusal;
    agreed.total_rows =
        ranks_.replicas ? rows_of_replicas(is_training, agreed, refusal, options) : agreed.rows;
    agreed.has_headers =
        options_.dynamic_shapes || known_signatures_[is_training ? 1 : 0] != agreed.signature;
    return agreed;
  }

  // Compares the integers ("words") with which the ranks describe this step. The result, or the
  // error, is the same on all ranks.
  Agreed compare(const std::vector<std::vector<int64_t>>& all) const {
    if (const auto other = parallel::first_unlike(all, 0)) {
      throw pipeline_refusal(
          format("rank 0 calls {} and rank {} calls {}; all ranks must make the same call",
                 call_of(all[0][0]), *other, call_of(all[*other][0])));
    }
    if (const auto other = parallel::first_unlike(all, 6)) {
      throw pipeline_refusal(format(
          "broadcast_losses is {} on rank 0 and {} on rank {}; pass the same value on all ranks",
          all[0][6] == 1, all[*other][6] == 1, *other));
    }
    const auto& first = all[schedule_.rank_of_stage.front()];
    const auto& last = all[schedule_.rank_of_stage.back()];
    if (last[2] >= 0 && last[2] != first[1]) {
      throw pipeline_refusal(format("the batch has {} rows on rank {}, the target {} on rank {}",
                                    first[1], schedule_.rank_of_stage.front(), last[2],
                                    schedule_.rank_of_stage.back()));
    }
    if (all[0][0] == 1) ties_->check_trained(all, kNumStepWords);
    Fnv1a signature;
    Fnv1a trained;
    for (const auto& words : all) {
      signature.add(static_cast<uint64_t>(words[4]));
      trained.add(static_cast<uint64_t>(words[5]));
    }
    signature.add(trained.value());
    return {.rows = first[1],
            .has_loss = last[3] == 1,
            .signature = signature.value(),
            .trained = trained.value()};
  }

  // Throws on all ranks of all replicas if the arguments of one rank are invalid, or if replicas
  // differ in a value that must be equal. Returns the number of rows of all replicas together.
  int64_t rows_of_replicas(bool is_training, const Agreed& agreed,
                           const std::optional<Error>& refusal,
                           const PipelineStepOptions& options) const {
    const auto make_words = [&]() -> std::vector<int64_t> {
      if (refusal) throw *refusal;
      return {is_training ? 1 : 0, agreed.rows, static_cast<int64_t>(agreed.trained)};
    };
    const auto all = gather_words(*ranks_.replicas, parallel::kPipelineCall, 3, make_words,
                                  timeout_of_agreement(options));
    if (const auto other = parallel::first_unlike(all, 0)) {
      throw pipeline_refusal(
          format("replica 0 calls {} and replica {} calls {}; all replicas must make the same call",
                 call_of(all[0][0]), *other, call_of(all[*other][0])));
    }
    if (const auto other = parallel::first_unlike(all, 2); other && is_training) {
      throw pipeline_refusal(
          format("the parameters that require grad in replica 0 differ from those in replica {}; "
                 "freeze or train the same parameters in all replicas",
                 *other));
    }
    int64_t rows = 0;
    for (const auto& of_replica : all) rows += of_replica[1];
    return rows;
  }

  PipelineResult result_of(parallel::PipelineExecutor::Output& output,
                           const std::vector<double>& shares, bool has_loss,
                           const PipelineStepOptions& options) const {
    const at::NoGradGuard no_grad;
    PipelineResult result{.losses = {},
                          .loss = {},
                          .outputs = std::move(output.outputs),
                          .peak_live_microbatches = output.peak_live_microbatches,
                          .compute_times = output.compute_times};
    if (has_loss && (holds_last_ || options.broadcast_losses)) {
      result.losses = at::empty({schedule_.num_microbatches}, at::kDouble);
      if (holds_last_) {
        // One copy from a device instead of one for each microbatch.
        std::vector<at::Tensor> values;
        for (const at::Tensor& loss : output.losses) {
          values.push_back(loss.reshape({}).to(at::kDouble));
        }
        result.losses.copy_(at::stack(values));
      }
    }
    if (has_loss && options.broadcast_losses) {
      ranks_.group.broadcast(result.losses,
                             {.root = schedule_.rank_of_stage.back(), .timeout = options.timeout});
    }
    if (result.losses.defined()) {
      result.loss = at::dot(result.losses, at::tensor(shares, at::kDouble));
    }
    return result;
  }

  parallel::PipelineRanks ranks_;
  PipelineOptions options_;
  PipelineSchedule schedule_;
  bool holds_first_;
  bool holds_last_;
  std::optional<DeviceMesh> shards_;                  // the mesh of the ranks that own shards
  std::unique_ptr<parallel::ShardedStages> sharded_;  // null if ranks have whole stages
  std::optional<parallel::PipelineExecutor> executor_;
  std::optional<parallel::StageRecords> records_;
  std::optional<parallel::TiedParameters> ties_;
  // The shapes of the last step in which messages had headers, as digests (Agreed::signature): [0]
  // in evaluation, [1] in training.
  std::optional<uint64_t> known_signatures_[2];
};

Pipeline::Pipeline(const std::vector<PipelineStage>& stages, const Ranks& ranks,
                   const PipelineOptions& options) {
  auto agreed = parallel::agree_on_schedule(ranks.group_of_one_axis(parallel::kPipelineCall, "pp"),
                                            stages, options);
  core_ = std::make_unique<Core>(stages, std::move(agreed), ranks, options);
}

Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;

Pipeline::Core& Pipeline::core() const {
  if (!core_)
    throw pipeline_refusal("this pipeline was moved from; use the one that it was moved to");
  return *core_;
}

PipelineResult Pipeline::step(const PipelineBatch& batch, const PipelineBatch& target,
                              const PipelineLoss& loss, const PipelineStepOptions& options) {
  return core().run(true, batch, target, loss, options);
}

PipelineResult Pipeline::forward(const PipelineBatch& batch, const PipelineBatch& target,
                                 const PipelineLoss& loss, const PipelineStepOptions& options) {
  return core().run(false, batch, target, loss, options);
}

void Pipeline::tie_parameters(const std::vector<StageParameter>& parameters) {
  core().ties().tie(parameters);
}

void Pipeline::check_tied_parameters() const {
  core().ties().check_equal();
}

std::vector<at::Tensor> Pipeline::parameters() const {
  return core().records().values();
}

std::vector<ParameterShard> Pipeline::parameter_shards() const {
  return core().records().all();
}

const PipelineSchedule& Pipeline::schedule() const {
  return core().schedule();
}

}  // namespace cadre
