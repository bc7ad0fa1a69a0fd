#include "cadre/parallel/zero/zero_core.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <map>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/parallel/shard/gather_shards.h"
#include "cadre/tensor/optim/optimizer_options.h"

namespace cadre::parallel {
namespace {

constexpr std::string_view kInState = "the gathering of its state after step {}";

wrap::LocatedGroup located(const ProcessGroup& group, const std::string& optimizer) {
  return {group, {.wrapper = "ZeroRedundancyOptimizer", .module = optimizer}};
}

}  // namespace

std::vector<std::vector<size_t>> zero_buckets(std::span<const ParameterSize> parameters,
                                              int64_t cap_bytes) {
  struct Open {
    std::vector<size_t> members = {};
    int64_t num_bytes = 0;
  };
  std::map<DType, Open> open;
  std::vector<std::vector<size_t>> buckets;
  for (size_t i = 0; i < parameters.size(); ++i) {
    Open& current = open[parameters[i].dtype];
    const int64_t num_bytes = parameters[i].num_bytes();
    if (current.num_bytes + num_bytes > cap_bytes && !current.members.empty()) {
      buckets.push_back(std::exchange(current, {}).members);
    }
    current.members.push_back(i);
    current.num_bytes += num_bytes;
  }
  for (auto& [dtype, rest] : open) buckets.push_back(std::move(rest.members));
  return buckets;
}

ZeroCore::ZeroCore(std::string optimizer, std::vector<NamedTensor> named, const ProcessGroup& group,
                   ZeroOptions options, const Settings& settings)
    : optimizer_(std::move(optimizer)),
      stage_(ZeroStage::kReplicatedGradients),
      named_(std::move(named)),
      group_(located(group, optimizer_)),
      options_(options) {
  for (size_t i = 0; i < named_.size(); ++i) indices_.emplace(key_of(named_[i].tensor), i);
  start(settings);
}

ZeroCore::ZeroCore(std::string optimizer,
                   std::vector<std::shared_ptr<shard::FlatParameters>> flat_parameters,
                   std::vector<ParameterShard> shards, const Settings& settings)
    : optimizer_(std::move(optimizer)),
      stage_(ZeroStage::kShardedGradients),
      group_(located(flat_parameters.at(0)->group().process_group(), optimizer_)),
      buckets_(std::move(flat_parameters)),
      shards_(std::move(shards)) {
  for (const auto& flat : buckets_) register_leaves(flat);
  for (size_t i = 0; i < shards_.size(); ++i) {
    indices_.emplace(key_of(shards_[i].parameter), i);
    indices_.emplace(key_of(shards_[i].values), i);
  }
  start(settings);
}

const void* ZeroCore::key_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl();
}

ZeroCore::~ZeroCore() {
  for (const auto& flat : buckets_) {
    try {
      flat->wait_unsharded();
    } catch (...) {
      // The gather has failed, or a step has thrown before it. Any access to a parameter throws an
      // error that says so.
    }
  }
}

void ZeroCore::refuse(const std::string& problem) const {
  throw Error(ErrorCode::kInvalidArgument, format("ZeroRedundancyOptimizer of {}, {}: {}",
                                                  optimizer_, group_.rank_text(), problem));
}

// Stage 1: moves the parameters that require grad and are not in a flat buffer yet into new
// buffers.
void ZeroCore::adopt(std::span<const at::Tensor> parameters) {
  if (stage_ == ZeroStage::kShardedGradients) return;
  std::vector<NamedTensor> fresh;
  for (const at::Tensor& parameter : parameters) {
    const NamedTensor& known = named_[index_of(parameter)];
    if (!parameter.requires_grad()) frozen_.push_back(parameter);
    if (!parameter.requires_grad() || leaves_.contains(key_of(parameter))) continue;
    const bool is_listed = std::ranges::any_of(
        fresh, [&](const NamedTensor& candidate) { return candidate.tensor.is_same(parameter); });
    if (!is_listed) fresh.push_back(known);
  }
  add_buckets(fresh);
}

void ZeroCore::add_buckets(const std::vector<NamedTensor>& parameters) {
  for (const std::vector<size_t>& members :
       zero_buckets(sizes_of(parameters), options_.bucket_cap_bytes)) {
    std::vector<NamedTensor> bucket;
    for (const size_t index : members) bucket.push_back(parameters[index]);
    buckets_.push_back(std::make_shared<shard::FlatParameters>(
        std::move(bucket), group_,
        shard::FlatParametersOptions{
            .keep_full = true,
            .name = format("in buffer {} of ZeroRedundancyOptimizer", buckets_.size()),
            .remedy = "call wait() of the optimizer before"}));
    register_leaves(buckets_.back());
  }
}

void ZeroCore::register_leaves(const std::shared_ptr<shard::FlatParameters>& flat) {
  for (size_t i = 0; i < flat->parameters().size(); ++i) {
    leaves_[key_of(flat->parameters()[i].tensor)] = flat->values(i);
    leaves_[key_of(flat->values(i))] = flat->values(i);
  }
}

at::Tensor ZeroCore::leaf_of(const at::Tensor& parameter) const {
  const auto found = leaves_.find(key_of(parameter));
  return found == leaves_.end() ? parameter : found->second;
}

at::Tensor ZeroCore::outer_of(const at::Tensor& parameter) const {
  if (stage_ == ZeroStage::kReplicatedGradients) return parameter;
  if (leaves_.contains(key_of(parameter))) return leaf_of(parameter);
  return shards_[index_of(parameter)].values;
}

std::vector<ParameterShard> ZeroCore::parameter_shards() const {
  if (stage_ == ZeroStage::kShardedGradients) {
    shard::follow_memory(shards_);
    return shards_;
  }
  std::vector<ParameterShard> shards;
  for (const auto& flat : buckets_) {
    for (ParameterShard& shard : flat->parameter_shards(*mesh_, mesh_->axes()[0].name)) {
      shards.push_back(std::move(shard));
    }
  }
  return shards;
}

// Returns the gradient of the elements that this rank updates. In stage 1 it is a view of the whole
// gradient if that is contiguous.
at::Tensor ZeroCore::gradient_of(const shard::FlatParameters& flat, size_t parameter) const {
  if (stage_ == ZeroStage::kShardedGradients) return flat.values(parameter).grad();
  const NamedTensor& named = flat.parameters()[parameter];
  const at::Tensor& gradient = named.tensor.grad();
  if (!gradient.defined()) return {};
  const FlatRange range = flat.layout().range(parameter, group_.rank());
  return gradient.detach().contiguous().view(-1).narrow(0, range.begin, range.size());
}

void ZeroCore::begin_step(const Groups& groups, const StateMarkOf& state_mark_of) {
  agree_on_step(groups, state_mark_of);
  for (const torch::optim::OptimizerParamGroup& group : groups) adopt(group.params());
  finish_gathers();
  if (stage_ == ZeroStage::kReplicatedGradients) check_reduced();
  gradients_.clear();
  for (const auto& flat : buckets_) {
    std::vector<at::Tensor>& gradients = gradients_.emplace_back();
    for (size_t i = 0; i < flat->parameters().size(); ++i) {
      gradients.push_back(gradient_of(*flat, i));
    }
  }
  for (const auto& flat : buckets_) {
    for (size_t i = 0; i < flat->parameters().size(); ++i) {
      at::Tensor(flat->values(i)).mutable_grad().reset();
    }
  }
}

void ZeroCore::lend_gradients(size_t bucket) {
  const auto give = [this](size_t index, bool is_lent) {
    for (size_t i = 0; i < gradients_[index].size(); ++i) {
      at::Tensor leaf = buckets_[index]->values(i);
      leaf.mutable_grad() = is_lent ? gradients_[index][i] : at::Tensor();
    }
  };
  if (lent_) give(*lent_, false);
  give(bucket, true);
  lent_ = bucket;
}

void ZeroCore::gather(size_t bucket) {
  buckets_[bucket]->mark_stale();
  buckets_[bucket]->unshard_async();
}

// Stage 2: gives the leaves the gradients of the shards back. Stage 1: removes the gradients of the
// leaves, which were views of the parameters' gradients for this step only.
void ZeroCore::end_step() {
  for (size_t k = 0; k < gradients_.size(); ++k) {
    for (size_t i = 0; i < gradients_[k].size(); ++i) {
      at::Tensor leaf = buckets_[k]->values(i);
      leaf.mutable_grad() =
          stage_ == ZeroStage::kShardedGradients ? gradients_[k][i] : at::Tensor();
    }
  }
  gradients_.clear();
  lent_.reset();
}

void ZeroCore::finish_gathers() {
  for (const auto& flat : buckets_) {
    flat->unshard_async();
    flat->wait_unsharded();
  }
}

void ZeroCore::show_writes() const {
  for (const auto& flat : buckets_) flat->show_writes();
}

void ZeroCore::check_alike(std::span<const int64_t> marks, const std::string& what) const {
  const auto count = static_cast<int64_t>(marks.size());
  const at::Tensor bounds = at::zeros({2 * count}, at::kLong);
  int64_t* const values = bounds.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    values[i] = marks[static_cast<size_t>(i)];
    values[count + i] = -values[i];
  }
  group_.enter({kInState, num_steps_});
  if (count > 0) group_.all_reduce(bounds, ReduceOp::kMax);
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] == -values[count + i]) continue;
    refuse(
        format("{} of parameter {} is not the same on all ranks: from {} to {}. Make the same "
               "steps on all ranks, and load the same state on all of them",
               what, i, -values[count + i], values[i]));
  }
}

std::vector<at::Tensor> ZeroCore::gather_states(size_t bucket,
                                                std::span<const at::Tensor> parts) const {
  const at::NoGradGuard no_grad;
  const shard::FlatParameters& flat = *buckets_[bucket];
  const shard::FlatLayout& layout = flat.layout();
  std::vector<at::Tensor> whole(parts.size());
  const auto first =
      std::ranges::find_if(parts, [](const at::Tensor& part) { return part.defined(); });
  if (first == parts.end()) return whole;
  const at::Tensor shard = at::zeros({layout.shard_numel()}, first->options());
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i].defined()) continue;
    shard.narrow(0, layout.offset_in_shard(i, group_.rank()), parts[i].numel())
        .copy_(parts[i].reshape({-1}));
  }
  const at::Tensor all = at::empty({layout.numel()}, first->options());
  group_.enter({kInState, num_steps_});
  group_.all_gather(all, shard);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i].defined()) continue;
    whole[i] = all.narrow(0, layout.offset(i), layout.numel(i))
                   .clone()
                   .view(flat.parameters()[i].tensor.sizes());
  }
  return whole;
}

std::pair<std::shared_ptr<shard::FlatParameters>, size_t> ZeroCore::find(
    const std::string& parameter) const {
  for (const auto& flat : buckets_) {
    for (size_t i = 0; i < flat->parameters().size(); ++i) {
      if (flat->parameters()[i].name == parameter) return {flat, i};
    }
  }
  refuse(
      format("the state has a parameter \"{}\", which does not belong to this optimizer; load the "
             "state of the same model",
             parameter));
}

void ZeroCore::check_state(const ParameterState& given, const ExpectedState& expected) const {
  size_t num_used = 0;
  for (const auto& [field, tensor] : given.tensors) {
    if (std::ranges::find(expected.fields, field) == expected.fields.end()) continue;
    ++num_used;
    if (tensor.sizes() == expected.sizes) continue;
    refuse(format("the state \"{}\" of \"{}\" has sizes {}, expected {}", field, given.parameter,
                  list_of(tensor.sizes()), list_of(expected.sizes)));
  }
  if (num_used != given.tensors.size() || num_used == 0) {
    refuse(
        format("the state of \"{}\" has {} tensors, of which this optimizer has {}; load the state "
               "of the same kind of optimizer",
               given.parameter, given.tensors.size(), num_used));
  }
  if (expected.options == nullptr) return;
  for (const std::string& field : optim_state::needed_state_of(*expected.options)) {
    if (std::ranges::find(given.tensors, field, &NamedTensor::name) != given.tensors.end())
      continue;
    refuse(
        format("the state of \"{}\" has no \"{}\", so the optimizer would start again with zeros; "
               "load a complete state, or leave the parameter out of it",
               given.parameter, field));
  }
}

}  // namespace cadre::parallel
