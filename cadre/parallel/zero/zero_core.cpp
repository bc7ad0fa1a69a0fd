#include "cadre/parallel/zero/zero_core.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/fnv1a.h"
#include "cadre/base/format.h"
#include "cadre/wrap/replica_check.h"

namespace cadre::parallel {
namespace {

constexpr std::string_view kInConstruction = "its construction";
constexpr std::string_view kInStep = "its step {}";
constexpr std::string_view kInState = "the gathering of its state after step {}";

wrap::LocatedGroup located(const ProcessGroup& group, const std::string& optimizer) {
  return {group, {.wrapper = "ZeroRedundancyOptimizer", .module = optimizer}};
}

// Up to 16 elements of the gradient, from its first to its last.
void add_sample(Fnv1a& digest, const at::Tensor& parameter) {
  constexpr int64_t kNumSamples = 16;
  at::Tensor gradient = parameter.grad();
  digest.add(gradient.defined() ? 1 : 0);
  if (!gradient.defined() || gradient.layout() != at::kStrided || gradient.numel() == 0) return;
  if (!gradient.is_non_overlapping_and_dense()) gradient = gradient.contiguous();
  const auto element = static_cast<int64_t>(gradient.element_size());
  const auto* const bytes = static_cast<const char*>(gradient.const_data_ptr());
  const int64_t last = gradient.numel() - 1;
  const int64_t count = std::min(kNumSamples, gradient.numel());
  for (int64_t k = 0; k < count; ++k) {
    const int64_t index = count == 1 ? 0 : last * k / (count - 1);
    digest.add(std::string_view(bytes + index * element, static_cast<size_t>(element)));
  }
}

const void* key_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl();
}

}  // namespace

ZeroCore::ZeroCore(std::string optimizer, std::vector<NamedTensor> named, const ProcessGroup& group,
                   ZeroOptions options)
    : optimizer_(std::move(optimizer)),
      stage_(ZeroStage::kReplicatedGradients),
      named_(std::move(named)),
      group_(located(group, optimizer_)),
      options_(options) {
  group_.enter({kInConstruction, 0});
  wrap::check_replicas_match("ZeroRedundancyOptimizer", {named_, {}}, group_);
  for (const NamedTensor& parameter : named_) {
    if (parameter.tensor.is_meta()) {
      refuse(
          format("\"{}\" is on the meta device and has no values; call cadre::materialize(module) "
                 "before, on all ranks",
                 parameter.name));
    }
    if (parameter.tensor.is_contiguous()) continue;
    refuse(
        format("\"{}\" is not contiguous, and a part of a flat buffer is; call "
               "parameter.set_data(parameter.contiguous()) before it is given to a wrapper",
               parameter.name));
  }
  wrap::broadcast_tensors(named_, /*root=*/0, group_);
  mesh_ = mesh_of_wrapper(group, "shard", named_);
}

ZeroCore::ZeroCore(std::string optimizer,
                   std::vector<std::shared_ptr<FlatParameters>> flat_parameters,
                   std::vector<ParameterShard> shards)
    : optimizer_(std::move(optimizer)),
      stage_(ZeroStage::kShardedGradients),
      group_(located(flat_parameters.at(0)->group().process_group(), optimizer_)),
      buckets_(std::move(flat_parameters)),
      shards_(std::move(shards)) {
  for (const auto& flat : buckets_) register_leaves(flat);
}

void ZeroCore::refuse(const std::string& problem) const {
  throw Error(ErrorCode::kInvalidArgument, format("ZeroRedundancyOptimizer of {}, rank {}: {}",
                                                  optimizer_, group_.rank(), problem));
}

void ZeroCore::adopt(std::span<const at::Tensor> parameters) {
  if (stage_ == ZeroStage::kShardedGradients) return;
  std::vector<NamedTensor> fresh;
  for (const at::Tensor& parameter : parameters) {
    const auto known = std::ranges::find_if(
        named_, [&](const NamedTensor& candidate) { return candidate.tensor.is_same(parameter); });
    if (known == named_.end()) {
      refuse(
          format("a parameter of sizes {} in a parameter group is none of the {} parameters that "
                 "the optimizer was made for; give it the parameters of the model that is "
                 "trained",
                 list_of(parameter.sizes()), named_.size()));
    }
    if (!parameter.requires_grad()) frozen_.push_back(parameter);
    if (!parameter.requires_grad() || leaves_.contains(key_of(parameter))) continue;
    const bool is_listed = std::ranges::any_of(
        fresh, [&](const NamedTensor& candidate) { return candidate.tensor.is_same(parameter); });
    if (!is_listed) fresh.push_back(*known);
  }
  add_buckets(fresh);
}

// In the order of the parameters, so that those of the first layers are gathered first.
void ZeroCore::add_buckets(const std::vector<NamedTensor>& parameters) {
  std::map<at::ScalarType, std::vector<NamedTensor>> open;
  std::map<at::ScalarType, int64_t> bytes;
  const auto close = [&](at::ScalarType dtype) {
    std::vector<NamedTensor>& bucket = open[dtype];
    if (bucket.empty()) return;
    buckets_.push_back(std::make_shared<FlatParameters>(
        std::exchange(bucket, {}), group_,
        FlatParametersOptions{
            .keep_full = true,
            .name = format("in buffer {} of ZeroRedundancyOptimizer", buckets_.size()),
            .remedy = "call wait() of the optimizer before"}));
    bytes[dtype] = 0;
    register_leaves(buckets_.back());
  };
  for (const NamedTensor& parameter : parameters) {
    const at::ScalarType dtype = parameter.tensor.scalar_type();
    const auto size = static_cast<int64_t>(parameter.tensor.nbytes());
    if (bytes[dtype] + size > options_.bucket_cap_bytes) close(dtype);
    open[dtype].push_back(parameter);
    bytes[dtype] += size;
  }
  for (const auto& item : open) close(item.first);
}

void ZeroCore::register_leaves(const std::shared_ptr<FlatParameters>& flat) {
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
  const auto shard = std::ranges::find_if(shards_, [&](const ParameterShard& candidate) {
    return candidate.parameter.is_same(parameter) || candidate.values.is_same(parameter);
  });
  if (shard != shards_.end()) return shard->values;
  refuse(
      format("a parameter of sizes {} in a parameter group is none of the model's {}; give it "
             "the parameters of the model that is trained",
             list_of(parameter.sizes()), shards_.size()));
}

std::vector<ParameterShard> ZeroCore::parameter_shards() const {
  if (stage_ == ZeroStage::kShardedGradients) return shards_;
  std::vector<ParameterShard> shards;
  for (const auto& flat : buckets_) {
    for (ParameterShard& shard : flat->parameter_shards(*mesh_, mesh_->axes()[0].name)) {
      shards.push_back(std::move(shard));
    }
  }
  return shards;
}

// A view of the whole gradient, where that is contiguous.
at::Tensor ZeroCore::gradient_of(const FlatParameters& flat, size_t parameter) const {
  if (stage_ == ZeroStage::kShardedGradients) return flat.values(parameter).grad();
  const NamedTensor& named = flat.parameters()[parameter];
  const at::Tensor& gradient = named.tensor.grad();
  if (!gradient.defined()) return {};
  if (gradient.layout() != at::kStrided) {
    refuse(
        format("the gradient of \"{}\" is not dense; make it dense, for example by an embedding "
               "with sparse(false)",
               named.name));
  }
  const FlatRange range = flat.layout().range(parameter, group_.rank().value);
  return gradient.detach().contiguous().view(-1).narrow(0, range.begin, range.size());
}

void ZeroCore::check_frozen() const {
  for (const at::Tensor& parameter : frozen_) {
    if (!parameter.grad().defined() || leaves_.contains(key_of(parameter))) continue;
    refuse(
        format("a parameter of sizes {} was frozen when the optimizer was made and has a "
               "gradient now; make the optimizer after it is unfrozen",
               list_of(parameter.sizes())));
  }
}

void ZeroCore::begin_step() {
  group_.enter({kInStep, ++num_steps_});
  finish_gathers();
  for (const auto& flat : buckets_) flat->check_in_place();
  if (stage_ == ZeroStage::kReplicatedGradients) {
    check_frozen();
    check_reduced();
  }
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

// In stage 2 the gradients of shards remain in the leaves; in stage 1 they were views for the step.
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

// Gradients that were not reduced differ between the ranks. The first step compares the sum of each
// gradient, later steps only some elements, which does not read all gradients.
void ZeroCore::check_reduced() {
  if (!std::exchange(is_reduction_checked_, true)) return check_sums();
  if (samples_are_equal()) return;
  check_sums();
  refuse(
      "the ranks have different gradients. With whole gradients they must be reduced before "
      "step(): run the model through DistributedDataParallel, or reduce them in the same way on "
      "all ranks");
}

bool ZeroCore::samples_are_equal() const {
  Fnv1a digest;
  for (const auto& flat : buckets_) {
    for (const NamedTensor& parameter : flat->parameters()) add_sample(digest, parameter.tensor);
  }
  const auto own = static_cast<int64_t>(digest.value());
  const at::Tensor bounds = at::tensor({own, ~own}, at::kLong);
  group_.all_reduce(bounds, ReduceOp::kMax);
  const int64_t* const largest = bounds.const_data_ptr<int64_t>();
  return largest[0] == ~largest[1];
}

void ZeroCore::check_sums() const {
  std::vector<NamedTensor> stepped;
  for (const auto& flat : buckets_) {
    stepped.insert(stepped.end(), flat->parameters().begin(), flat->parameters().end());
  }
  const auto count = static_cast<int64_t>(stepped.size());
  const int world_size = group_.world_size();
  constexpr double kUndefined = -1.2345e300;  // which is not zero
  const at::Tensor sums = at::zeros({count}, at::kDouble);
  for (size_t i = 0; i < stepped.size(); ++i) {
    const at::Tensor& gradient = stepped[i].tensor.grad();
    sums.mutable_data_ptr<double>()[i] =
        gradient.defined() ? at::sum(gradient.detach().to_dense(), at::kDouble).item<double>()
                           : kUndefined;
  }
  const at::Tensor all = at::empty({world_size * count}, at::kDouble);
  group_.all_gather(all, sums);
  const double* const values = all.const_data_ptr<double>();
  for (int64_t i = 0; i < count; ++i) {
    for (int rank = 1; rank < world_size; ++rank) {
      if (std::memcmp(&values[i], &values[rank * count + i], sizeof(double)) == 0) continue;
      refuse(
          format("ranks 0 and {} have different gradients of \"{}\". With whole gradients they "
                 "must be reduced before step(): run the model through "
                 "DistributedDataParallel, or reduce them in the same way on all ranks",
                 rank, stepped[static_cast<size_t>(i)].name));
    }
  }
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
        format("{} of parameter {} is not the same on all ranks: from {} to {}. All ranks make "
               "the same steps and load the same state",
               what, i, -values[count + i], values[i]));
  }
}

std::vector<at::Tensor> ZeroCore::gather_states(size_t bucket,
                                                std::span<const at::Tensor> parts) const {
  const at::NoGradGuard no_grad;
  const FlatParameters& flat = *buckets_[bucket];
  const FlatLayout& layout = flat.layout();
  std::vector<at::Tensor> whole(parts.size());
  const auto first =
      std::ranges::find_if(parts, [](const at::Tensor& part) { return part.defined(); });
  if (first == parts.end()) return whole;
  const at::Tensor shard = at::zeros({layout.shard_numel()}, first->options());
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i].defined()) continue;
    shard.narrow(0, layout.offset_in_shard(i, group_.rank().value), parts[i].numel())
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

std::pair<std::shared_ptr<FlatParameters>, size_t> ZeroCore::find(
    const std::string& parameter) const {
  for (const auto& flat : buckets_) {
    for (size_t i = 0; i < flat->parameters().size(); ++i) {
      if (flat->parameters()[i].name == parameter) return {flat, i};
    }
  }
  refuse(
      format("the state has \"{}\", which is none of this optimizer's parameters; load "
             "the state of the same model",
             parameter));
}

void ZeroCore::check_sizes(const FullParameterState& given, const std::string& field,
                           at::IntArrayRef sizes) const {
  const at::Tensor& tensor = given.tensors.at(field);
  if (tensor.sizes() == sizes) return;
  refuse(format("the state \"{}\" of \"{}\" has sizes {}, expected {}", field, given.name,
                list_of(tensor.sizes()), list_of(sizes)));
}

void ZeroCore::check_all_used(const FullParameterState& given, size_t num_used) const {
  if (num_used == given.tensors.size() && num_used > 0) return;
  refuse(
      format("the state of \"{}\" has {} tensors, of which {} are those of this "
             "optimizer; load the state of the same kind of optimizer",
             given.name, given.tensors.size(), num_used));
}

}  // namespace cadre::parallel
