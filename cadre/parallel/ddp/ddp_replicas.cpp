#include "cadre/parallel/ddp/ddp_replicas.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/buckets/bucket_layout.h"
#include "cadre/parallel/buckets/comm_hook.h"
#include "cadre/parallel/buckets/replicated_gradients.h"
#include "cadre/parallel/buckets/sharded_gradients.h"
#include "cadre/parallel/reduction/agreement/trailer.h"
#include "cadre/parallel/shard/division/parameter_division.h"
#include "cadre/parallel/shard/gather_shards.h"
#include "cadre/parallel/shard/shardable.h"
#include "cadre/tensor/group/agreement.h"
#include "cadre/tensor/hooks/device_check.h"
#include "cadre/tensor/hooks/named_tensors.h"
#include "cadre/tensor/mesh/device_mesh.h"

namespace cadre::parallel {

namespace {

constexpr const char* kWrapper = "DistributedDataParallel";
constexpr const char* kShardAxis = "shard";

using FlatParametersList = std::vector<std::shared_ptr<shard::FlatParameters>>;

// Throws if the trained parameters cannot be moved into flat buffers, or if one of them shares
// memory with another tensor, because the move would end the sharing. Does not change the module.
void check_shardable_model(const torch::nn::Module& module, const wrap::LocatedGroup& group) {
  const std::string what = format("{}, {}", kWrapper, group.rank_text());
  std::vector<NamedTensor> moved;
  std::vector<NamedTensor> kept = distinct_buffers(module);
  for (const NamedTensor& parameter : distinct_parameters(module)) {
    // Throws if the parameter was divided without a mesh.
    static_cast<void>(shard::division_of(parameter));
    (parameter.tensor.requires_grad() ? moved : kept).push_back(parameter);
    const at::ScalarType dtype = parameter.tensor.scalar_type();
    if (!parameter.tensor.requires_grad()) continue;
    shard::check_shardable(what, {parameter}, {.shard = dtype, .compute = dtype});
  }
  shard::check_apart(what, moved, kept);
  shard::warn_of_other_holders(group.log_sink(), "ddp", moved, kept);
}

// Returns the layout as text for an error, or a hash of it if the text is long.
std::string text_of(const std::optional<BucketLayout>& layout) {
  constexpr size_t kLongest = 200;
  if (!layout) return "none";
  std::string text = layout->to_string();
  if (text.size() <= kLongest) return "\"" + text + "\"";
  return format("one of {} buckets with digest {}", layout->buckets.size(), fnv1a(text));
}

bool replicas_may_differ(const DistributedDataParallelOptions& options) {
  return options.comm_hook && options.comm_hook->traits().replicas_may_differ;
}

// Replicas that may differ are not compared.
reduction::ParameterValues values_of(const DistributedDataParallelOptions& options) {
  if (options.gradients == GradientPlacement::kSharded) return reduction::ParameterValues::kSharded;
  return replicas_may_differ(options) ? reduction::ParameterValues::kUnwatched
                                      : reduction::ParameterValues::kWhole;
}

// Returns the options that must be equal on all ranks, as text. Throws if options.layout is that of
// another model.
std::vector<AgreedField> agreed_fields(const torch::nn::Module& module,
                                       const DistributedDataParallelOptions& options) {
  if (options.comm_hook && options.gradients == GradientPlacement::kSharded) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: the communication hook {} reduces whole gradients, and with "
                       "GradientPlacement::kSharded each rank gets those of its shards only. Leave "
                       "comm_hook out, or set gradients = GradientPlacement::kReplicated",
                       kWrapper, options.comm_hook->name()));
  }
  if (replicas_may_differ(options) && options.weighting == GradientWeighting::kSum) {
    throw Error(ErrorCode::kInvalidArgument,
                format("{}: with the communication hook {} gradients are means over a part of the "
                       "ranks, and GradientWeighting::kSum needs the sum over all. Set weighting "
                       "to GradientWeighting::kSamples or kEqual, and let the loss be a mean",
                       kWrapper, options.comm_hook->name()));
  }
  if (options.layout) {
    std::vector<NamedTensor> trained = distinct_parameters(module);
    std::erase_if(trained,
                  [](const NamedTensor& parameter) { return !parameter.tensor.requires_grad(); });
    check_layout_fits(*options.layout, sizes_of(trained));
  }
  return {{"gradients", options.gradients == GradientPlacement::kSharded
                            ? "GradientPlacement::kSharded"
                            : "GradientPlacement::kReplicated"},
          {"bucket_caps.first_bytes", format("{}", options.bucket_caps.first_bytes)},
          {"bucket_caps.bytes", format("{}", options.bucket_caps.bytes)},
          {"layout", text_of(options.layout)},
          {"comm_hook", options.comm_hook ? options.comm_hook->name() : "none"}};
}

// Makes one FlatParameters for each bucket of the layout, which is the same as for replicated
// gradients.
FlatParametersList make_flat_parameters(const std::vector<NamedTensor>& trained,
                                        const wrap::LocatedGroup& group,
                                        const DistributedDataParallelOptions& options) {
  const std::vector<ParameterSize> sizes = sizes_of(trained);
  const BucketLayout layout = options.layout.value_or(
      plan_bucket_layout(sizes, reverse_order(sizes.size()), options.bucket_caps));
  FlatParametersList flat_parameters;
  for (const BucketLayout::Bucket& bucket : layout.buckets) {
    std::vector<NamedTensor> members;
    for (const int64_t index : bucket.parameters) members.push_back(trained[index]);
    flat_parameters.push_back(std::make_shared<shard::FlatParameters>(
        std::move(members), group,
        shard::FlatParametersOptions{
            .keep_full = true,
            .name = format("in bucket {} of {}", flat_parameters.size(), kWrapper)}));
  }
  return flat_parameters;
}

std::unique_ptr<ReplicatedGradients> make_replicated(
    std::vector<NamedTensor> trained, const wrap::LocatedGroup& group,
    const DistributedDataParallelOptions& options) {
  return std::make_unique<ReplicatedGradients>(
      std::move(trained), group,
      ReplicatedGradients::Options{.caps = options.bucket_caps,
                                   .layout = options.layout,
                                   .trailer_numel = reduction::kTrailerNumel,
                                   .hook = options.comm_hook});
}

// Returns the shards in the order of the module's parameters. Frozen parameters are included; every
// rank has them whole.
std::vector<ParameterShard> shards_of(const torch::nn::Module& module,
                                      const FlatParametersList& flat_parameters,
                                      const DeviceMesh& mesh) {
  std::vector<ParameterShard> of_flat;
  for (const auto& flat : flat_parameters) {
    for (ParameterShard& shard : flat->parameter_shards(mesh, mesh.axes()[0].name)) {
      of_flat.push_back(std::move(shard));
    }
  }
  std::vector<ParameterShard> shards;
  for (const NamedTensor& parameter : distinct_parameters(module)) {
    const auto found = std::ranges::find_if(of_flat, [&parameter](const ParameterShard& shard) {
      return shard.parameter.is_same(parameter.tensor);
    });
    if (found != of_flat.end()) {
      shards.push_back(*found);
      continue;
    }
    shards.push_back(shard::on_joint_mesh({.name = parameter.name,
                                           .sizes = parameter.tensor.sizes().vec(),
                                           .mesh = mesh,
                                           .placements = {Replicate()},
                                           .flat_axis = std::nullopt,
                                           .range = {.begin = 0, .end = parameter.tensor.numel()},
                                           .values = shard::whole_values(parameter.tensor),
                                           .parameter = parameter.tensor},
                                          shard::division_of(parameter).get()));
  }
  return shards;
}

}  // namespace

std::vector<ParameterShard> DdpReplicas::parameter_shards() const {
  if (!shards.empty()) {
    shard::follow_memory(shards);
    return shards;
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      format(
          "{}: parameter_shards() needs the option gradients = GradientPlacement::kSharded; with "
          "replicated gradients every rank has the whole parameters and gradients, in module()",
          core->wrapper().place()));
}

SavedCommHook DdpReplicas::saved_hook() const {
  return hook == nullptr ? SavedCommHook() : hook->saved();
}

void DdpReplicas::load_hook(const SavedCommHook& saved) const {
  if (hook != nullptr) return hook->load(saved);
  if (saved.empty()) return;
  throw Error(ErrorCode::kInvalidArgument,
              format("{}: load_comm_hook_state() was given {} tensors, but the wrapper has no "
                     "communication hook, or its group has one rank. Pass the option comm_hook "
                     "with which the state was saved",
                     kWrapper, saved.size()));
}

DdpReplicas make_ddp_replicas(const std::shared_ptr<torch::nn::Module>& module, const Ranks& ranks,
                              const DistributedDataParallelOptions& options) {
  const ProcessGroup& group = ranks.group_of_one_axis(kWrapper, "dp");
  const bool is_sharded = options.gradients == GradientPlacement::kSharded;
  const auto flat_parameters = std::make_shared<FlatParametersList>();
  reduction::DataParallelOptions core_options{.wrapper = kWrapper,
                                              .component = "ddp",
                                              .weighting = options.weighting,
                                              .broadcast_buffers = options.broadcast_buffers,
                                              .is_idle_alone = !is_sharded,
                                              .values = values_of(options),
                                              .agreed = [&] {
                                                if (is_sharded)
                                                  check_shardable_model(*module, group);
                                                return agreed_fields(*module, options);
                                              }};
  CommHook::State* hook = nullptr;
  reduction::MakeGradientStorage make_storage =
      [&](std::vector<NamedTensor> trained,
          const wrap::LocatedGroup& located) -> std::unique_ptr<GradientStorage> {
    auto storage = make_replicated(std::move(trained), located, options);
    hook = storage->hook();
    return storage;
  };
  if (is_sharded) {
    make_storage = [&](std::vector<NamedTensor> trained,
                       const wrap::LocatedGroup& located) -> std::unique_ptr<GradientStorage> {
      wrap::make_on_all_ranks(group, kWrapper, trained.front().tensor.device(), [&] {
        *flat_parameters = make_flat_parameters(trained, located, options);
      });
      return std::make_unique<ShardedGradients>(
          std::move(trained), *flat_parameters,
          ShardedGradients::Groups{.all = located, .shard = located, .replicate = std::nullopt},
          ShardedGradients::Options{
              .layout = options.layout,
              .trailer_numel = reduction::kTrailerNumel,
              .wrapper = kWrapper,
              .remedy = "With GradientPlacement::kSharded make a cadre::ZeroRedundancyOptimizer "
                        "from the wrapper",
              .refuses_changed_values = true});
    };
    // If an optimizer has changed the shards, the gather of the new values is in flight already, or
    // is started here.
    core_options.before_forward = [flat_parameters] {
      for (const auto& flat : *flat_parameters) flat->unshard_async();
      for (const auto& flat : *flat_parameters) flat->wait_unsharded();
    };
  }
  auto core = std::make_shared<reduction::DataParallelCore>(module, group, std::move(core_options),
                                                            make_storage);
  if (is_sharded) {
    core->call_before_backward([flat_parameters] {
      for (const auto& flat : *flat_parameters) flat->show_writes();
    });
  }
  DdpReplicas replicas{.core = std::move(core),
                       .group = group,
                       .flat_parameters = *flat_parameters,
                       .shards = {},
                       .hook = hook};
  if (replicas.flat_parameters.empty()) return replicas;
  const DeviceMesh mesh = shard::mesh_of_wrapper(group, kShardAxis, distinct_parameters(*module));
  replicas.shards = shards_of(*module, replicas.flat_parameters, mesh);
  return replicas;
}

}  // namespace cadre::parallel
