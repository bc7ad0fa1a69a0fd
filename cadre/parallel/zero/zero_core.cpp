#include "cadre/parallel/zero/zero_core.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <torch/optim/optimizer.h>

#include <algorithm>
#include <exception>
#include <map>
#include <utility>

#include "cadre/base/error.h"
#include "cadre/base/fnv1a.h"
#include "cadre/base/format.h"
#include "cadre/group/agreement.h"
#include "cadre/parallel/zero/gradient_comparison.h"
#include "cadre/parallel/zero/optimizer_options.h"
#include "cadre/shard/shardable.h"
#include "cadre/wrap/replica_check.h"

namespace cadre::parallel {
namespace {

constexpr const char* kZeroCall = "cadre::ZeroRedundancyOptimizer";
constexpr std::string_view kEqualGroups =
    "give all ranks the same parameter groups in the same order, with the same options";
constexpr std::string_view kInConstruction = "its construction";
constexpr std::string_view kInStep = "its step {}";
constexpr std::string_view kInState = "the gathering of its state after step {}";

wrap::LocatedGroup located(const ProcessGroup& group, const std::string& optimizer) {
  return {group, {.wrapper = "ZeroRedundancyOptimizer", .module = optimizer}};
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
  for (size_t i = 0; i < named_.size(); ++i) indices_.emplace(key_of(named_[i].tensor), i);
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
  for (size_t i = 0; i < shards_.size(); ++i) {
    indices_.emplace(key_of(shards_[i].parameter), i);
    indices_.emplace(key_of(shards_[i].values), i);
  }
}

ZeroCore::~ZeroCore() {
  for (const auto& flat : buckets_) {
    try {
      flat->wait_unsharded();
    } catch (...) {
      // The gather has failed, or a step ended by an exception before it: what is touched says so.
    }
  }
}

void ZeroCore::start(const Groups& groups, const torch::optim::OptimizerOptions& defaults) {
  group_.enter({kInConstruction, 0});
  const bool is_whole = stage_ == ZeroStage::kReplicatedGradients;
  if (is_whole) wrap::check_replicas_match("ZeroRedundancyOptimizer", {named_, {}}, group_);
  const auto make_fields = [&] {
    if (is_whole) check_named();
    return fields_of(groups, &defaults);
  };
  check_equal_on_all_ranks(group_.process_group(), kZeroCall, make_fields, kEqualGroups);
  if (!is_whole) return;
  wrap::broadcast_tensors(named_, /*root=*/0, group_);
  mesh_ = mesh_of_wrapper(group_.process_group(), "shard", named_);
}

void ZeroCore::agree_on_group(const torch::optim::OptimizerParamGroup& group,
                              const torch::optim::OptimizerOptions& defaults) const {
  const auto make_fields = [&] {
    check_fresh(group.params());
    return fields_of({group}, &defaults);
  };
  check_equal_on_all_ranks(group_.process_group(), kZeroCall, make_fields, kEqualGroups);
}

void ZeroCore::check_named() const {
  for (const NamedTensor& parameter : named_) {
    static_cast<void>(division_of(parameter));  // throws where it is not known
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
  std::vector<at::Tensor> trained;
  for (const NamedTensor& parameter : named_) {
    if (parameter.tensor.requires_grad()) trained.push_back(parameter.tensor);
  }
  check_fresh(trained);
}

// What is laid into buffers moves away from what it may share memory with.
void ZeroCore::check_fresh(std::span<const at::Tensor> parameters) const {
  if (stage_ == ZeroStage::kShardedGradients) return;
  const std::string what =
      format("ZeroRedundancyOptimizer of {}, rank {}", optimizer_, group_.rank());
  std::vector<bool> is_moved(named_.size(), false);
  for (const at::Tensor& parameter : parameters) {
    const size_t index = index_of(parameter);
    is_moved[index] = parameter.requires_grad() && !leaves_.contains(key_of(parameter));
  }
  std::vector<NamedTensor> moved;
  std::vector<NamedTensor> kept;
  for (size_t i = 0; i < named_.size(); ++i) {
    if (leaves_.contains(key_of(named_[i].tensor))) continue;
    (is_moved[i] ? moved : kept).push_back(named_[i]);
  }
  if (moved.empty()) return;
  for (const NamedTensor& parameter : moved) {
    const at::ScalarType dtype = parameter.tensor.scalar_type();
    shard::check_shardable(what, {parameter}, {.shard = dtype, .compute = dtype});
  }
  shard::check_apart(what, moved, kept);
}

size_t ZeroCore::index_of(const at::Tensor& parameter) const {
  const auto found = indices_.find(key_of(parameter));
  if (found != indices_.end()) return found->second;
  refuse(
      format("a parameter of sizes {} in a parameter group is none of the {} parameters that "
             "the optimizer was made for; give it the parameters of the model that is "
             "trained",
             list_of(parameter.sizes()), std::max(named_.size(), shards_.size())));
}

// defaults: null where every group has options.
std::vector<AgreedField> ZeroCore::fields_of(const Groups& groups,
                                             const torch::optim::OptimizerOptions* defaults) const {
  std::vector<AgreedField> fields = {{"stage", format("{}", static_cast<int>(stage_))},
                                     {"bucket_cap_bytes", format("{}", options_.bucket_cap_bytes)},
                                     {"wait_in_step", !options_.wait_in_step   ? "unset"
                                                      : *options_.wait_in_step ? "true"
                                                                               : "false"}};
  const auto name_of = [this](const at::Tensor& parameter) {
    const size_t index = index_of(parameter);
    return stage_ == ZeroStage::kReplicatedGradients ? named_[index].name : shards_[index].name;
  };
  add_fields_of(groups, defaults, name_of, fields);
  return fields;
}

uint64_t ZeroCore::digest_of(const Groups& groups) const {
  Fnv1a digest;
  for (const torch::optim::OptimizerParamGroup& group : groups) {
    digest.add(group.params().size());
    for (const at::Tensor& parameter : group.params()) digest.add(index_of(parameter));
    if (group.has_options()) digest.add(text_of(group.options()));
  }
  return digest.value();
}

void ZeroCore::refuse(const std::string& problem) const {
  throw Error(ErrorCode::kInvalidArgument, format("ZeroRedundancyOptimizer of {}, rank {}: {}",
                                                  optimizer_, group_.rank(), problem));
}

void ZeroCore::check_on_all(const std::function<void()>& check) const {
  check_on_all_ranks(group_.process_group(), kZeroCall, check);
}

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
  return shards_[index_of(parameter)].values;
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

void ZeroCore::check_step(const Groups& groups) const {
  for (const auto& flat : buckets_) flat->check_in_place();
  if (stage_ == ZeroStage::kShardedGradients) return;
  check_frozen();
  for (const torch::optim::OptimizerParamGroup& group : groups) {
    check_fresh(group.params());
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined() || parameter.grad().layout() == at::kStrided) continue;
      refuse(
          format("the gradient of \"{}\" is not dense; make it dense, for example by an embedding "
                 "with sparse(false)",
                 named_[index_of(parameter)].name));
    }
  }
}

void ZeroCore::agree_on_step(const Groups& groups) {
  group_.enter({kInStep, ++num_steps_});
  std::exception_ptr refusal;
  uint64_t settings = 0;
  uint64_t samples = 0;
  try {
    check_step(groups);
    settings = digest_of(groups);
    samples = digest_of_samples(groups);
  } catch (...) {
    refusal = std::current_exception();
  }
  const auto low = static_cast<int64_t>(settings);
  const auto sampled = static_cast<int64_t>(samples);
  const at::Tensor bounds =
      at::tensor({low, ~low, sampled, ~sampled, refusal ? 1L : 0L}, at::kLong);
  group_.all_reduce(bounds, ReduceOp::kMax);
  const int64_t* const largest = bounds.const_data_ptr<int64_t>();
  if (largest[4] != 0) {
    check_on_all([&refusal] {
      if (refusal) std::rethrow_exception(refusal);
    });
  }
  if (largest[0] != ~largest[1]) {
    check_equal_on_all_ranks(
        group_.process_group(), kZeroCall, [&] { return fields_of(groups, nullptr); },
        kEqualGroups);
  }
  samples_are_equal_ = largest[2] == ~largest[3];
}

void ZeroCore::begin_step() {
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
  if (samples_are_equal_) return;
  check_sums();
  refuse(
      "the ranks have different gradients. With whole gradients they must be reduced before "
      "step(): run the model through DistributedDataParallel, or reduce them in the same way on "
      "all ranks");
}

// Of whole gradients.
uint64_t ZeroCore::digest_of_samples(const Groups& groups) const {
  Fnv1a digest;
  if (stage_ == ZeroStage::kShardedGradients) return digest.value();
  for (const torch::optim::OptimizerParamGroup& group : groups) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.requires_grad()) add_gradient_sample(digest, parameter);
    }
  }
  return digest.value();
}

void ZeroCore::check_sums() const {
  std::vector<NamedTensor> stepped;
  for (const auto& flat : buckets_) {
    stepped.insert(stepped.end(), flat->parameters().begin(), flat->parameters().end());
  }
  const std::optional<UnlikeGradient> unlike = first_unlike_sum(stepped, group_);
  if (!unlike) return;
  refuse(
      format("ranks 0 and {} have different gradients of \"{}\". With whole gradients they "
             "must be reduced before step(): run the model through "
             "DistributedDataParallel, or reduce them in the same way on all ranks",
             unlike->rank, stepped[unlike->parameter].name));
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

void ZeroCore::check_state(const FullParameterState& given, const ExpectedState& expected) const {
  size_t num_used = 0;
  for (const auto& [field, tensor] : given.tensors) {
    if (std::ranges::find(expected.fields, field) == expected.fields.end()) continue;
    ++num_used;
    if (tensor.sizes() == expected.sizes) continue;
    refuse(format("the state \"{}\" of \"{}\" has sizes {}, expected {}", field, given.name,
                  list_of(tensor.sizes()), list_of(expected.sizes)));
  }
  if (num_used != given.tensors.size() || num_used == 0) {
    refuse(
        format("the state of \"{}\" has {} tensors, of which {} are those of this "
               "optimizer; load the state of the same kind of optimizer",
               given.name, given.tensors.size(), num_used));
  }
  if (expected.options == nullptr) return;
  for (const std::string& field : needed_state_of(*expected.options)) {
    if (given.tensors.contains(field)) continue;
    refuse(
        format("the state of \"{}\" has no \"{}\", without which the optimizer would begin anew; "
               "load a whole state, and leave out a parameter that has none",
               given.name, field));
  }
}

}  // namespace cadre::parallel
