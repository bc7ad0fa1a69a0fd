#include "cadre/train/training/pipelined_model.h"

#include <ATen/ops/empty.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/deferred/deferred_init.h"
#include "cadre/parallel/layers/tensor_parallel_layer.h"
#include "cadre/parallel/pp/layered/layered_pipeline.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/hooks/named_tensors.h"

namespace cadre::training_parts {
namespace {

[[noreturn]] void refuse(const std::string& problem) {
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: the degree pipeline is above 1, {}", kCall, problem));
}

void check_options(const TrainingOptions& options, DataStrategy strategy) {
  if (strategy == DataStrategy::kZero1 || strategy == DataStrategy::kZero2) {
    refuse(format("and {} divides no pipeline; choose ddp, fsdp or hsdp", to_string(strategy)));
  }
  if (options.autocast) refuse("and its stages run without autocast; leave options.autocast out");
  if (options.weighting != GradientWeighting::kSamples) {
    refuse("and it weights gradients by samples; leave options.weighting as it is");
  }
  if (options.ddp.comm_hook) {
    refuse("and it reduces gradients without hooks; leave options.ddp.comm_hook out");
  }
  const ShardPrecision& precision = options.fsdp.precision;
  if (options.fsdp.offload || options.fsdp.wrap_policy || precision.parameters ||
      precision.reduce || precision.outputs) {
    refuse(
        "and its stages are the units of fsdp and hsdp, in the precision of the module, in memory; "
        "leave precision, offload and wrap_policy of options.fsdp out");
  }
}

std::shared_ptr<torch::nn::SequentialImpl> checked(const std::shared_ptr<torch::nn::Module>& module,
                                                   const TrainingDivision& division,
                                                   const TrainingOptions& options) {
  std::shared_ptr<torch::nn::SequentialImpl> layers;
  check_on_all_ranks(division.world(), kCall, [&] {
    check_options(options, division.strategy());
    layers = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(module);
    if (layers == nullptr) {
      refuse(
          format("and the module is {}, whose layers cannot be listed; make it a "
                 "torch::nn::Sequential of its layers, each of which takes the output of the "
                 "one before it",
                 module == nullptr ? "null" : module->name()));
    }
  });
  return layers;
}

Pipeline make_pipeline(const torch::nn::SequentialImpl& layers, const TrainingDivision& division,
                       const TrainingOptions& options) {
  PipelineOptions made{.schedule = options.schedule,
                       .num_microbatches = static_cast<int>(options.num_parts),
                       .allow_uneven_microbatches = true};
  if (options.before_part) {
    made.before_microbatch = [before = options.before_part](const PipelineMicrobatch& microbatch) {
      before(microbatch.first_row, microbatch.num_rows);
    };
  }
  const Ranks& data = division.wrapped_ranks();
  if (data.size() > 1 && has_units(division.strategy())) {
    made.shards = data;
  } else if (data.size() > 1) {
    made.replicas = data.group();
  }
  return pipeline_of(layers, *division.stages(), made);
}

// Returns the layers of a rank.
std::vector<std::shared_ptr<torch::nn::Module>> layers_of(const torch::nn::SequentialImpl& layers,
                                                          const std::vector<int>& ranks, int rank) {
  const auto named = layers.named_children();
  std::vector<std::shared_ptr<torch::nn::Module>> own;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] == rank) own.push_back(named[i].value());
  }
  return own;
}

}  // namespace

PipelinedModel::PipelinedModel(const std::shared_ptr<torch::nn::Module>& module,
                               const TrainingDivision& division, const TrainingOptions& options)
    : module_(checked(module, division, options)),
      stages_(division.stages()->group("pp")),
      copies_(division.wrapped_ranks().group()),
      shares_buffers_(has_units(division.strategy()) ? options.fsdp.broadcast_buffers
                                                     : options.ddp.broadcast_buffers),
      pipeline_(make_pipeline(*module_, division, options)),
      ranks_(parallel::ranks_of_layers(*module_, pipeline_.schedule())),
      own_layers_(layers_of(*module_, ranks_, stages_.rank())),
      parameters_(pipeline_, division.world()) {
  release_other_stages();
}

// Other ranks have these parameters. A program that used them here would read old values; without
// memory they throw.
void PipelinedModel::release_other_stages() const {
  std::set<const c10::TensorImpl*> own;
  const auto keep = [&own](const torch::nn::Module& kept) {
    for (const at::Tensor& parameter : kept.parameters()) {
      own.insert(parameter.unsafeGetTensorImpl());
    }
  };
  for (const auto& own_layer : own_layers_) {
    for (const auto& part : own_layer->modules()) {
      keep(*part);
      const auto* const sharing = dynamic_cast<const SharingModule*>(part.get());
      if (sharing != nullptr && sharing->shared_module()) keep(*sharing->shared_module());
    }
  }
  for (const NamedTensor& parameter : distinct_parameters(*module_)) {
    if (own.contains(parameter.tensor.unsafeGetTensorImpl()) || is_deferred(parameter.tensor)) {
      continue;
    }
    parameter.tensor.set_data(at::empty({0}, parameter.tensor.options().requires_grad(false)));
  }
}

// Gives the copies of a stage the buffers of the first one, as DistributedDataParallel does before
// each forward.
void PipelinedModel::share_buffers() const {
  if (!shares_buffers_) return;
  for (const auto& layer : own_layers_) {
    for (const at::Tensor& buffer : layer->buffers()) copies_.broadcast(buffer);
  }
}

at::Tensor PipelinedModel::backward(const at::Tensor& inputs, const at::Tensor& targets,
                                    const PipelineLoss& loss) {
  share_buffers();
  return pipeline_.step(inputs, targets, loss, {.broadcast_losses = true}).loss;
}

at::Tensor PipelinedModel::evaluate(const at::Tensor& inputs, const at::Tensor& targets,
                                    const PipelineLoss& loss) {
  return pipeline_.forward(inputs, targets, loss, {.broadcast_losses = true}).loss;
}

SnapshotParts PipelinedModel::parts() const {
  share_buffers();
  SnapshotParts parts = parts_of(records());
  std::map<std::string, int> rank_of;  // the key is the name of a layer
  const auto named = module_->named_children();
  for (size_t i = 0; i < ranks_.size(); ++i) rank_of[named[i].key()] = ranks_[i];
  for (const NamedTensor& item : distinct_buffers(*module_)) {
    at::Tensor buffer = item.tensor;
    // Another rank has this layer, so the layer has no memory here.
    if (is_deferred(buffer)) {
      const c10::Device device = records()[0].values.device();
      buffer = at::empty(buffer.sizes(), at::device(device).dtype(buffer.scalar_type()));
    }
    stages_.broadcast(buffer, {.root = rank_of.at(item.name.substr(0, item.name.find('.')))});
    parts.buffers.push_back(whole_tensor(item.name, buffer));
  }
  return parts;
}

}  // namespace cadre::training_parts
