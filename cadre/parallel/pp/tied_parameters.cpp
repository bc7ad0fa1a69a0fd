#include "cadre/parallel/pp/tied_parameters.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <utility>

#include "cadre/core/base/fnv1a.h"
#include "cadre/core/base/format.h"

namespace cadre::parallel {
namespace {

// The state of a tied parameter on a rank: the rank does not have it, it is frozen, or it is
// trained.
constexpr int64_t kNotHeld = -1;
constexpr int64_t kFrozen = 0;
constexpr int64_t kTrained = 1;
constexpr int64_t kMixed = 2;

int64_t trained_word(const std::vector<at::Tensor>& own) {
  if (own.empty()) return kNotHeld;
  const auto num_trained =
      std::ranges::count_if(own, [](const at::Tensor& tensor) { return tensor.requires_grad(); });
  if (num_trained == 0) return kFrozen;
  return static_cast<size_t>(num_trained) == own.size() ? kTrained : kMixed;
}

// Throws unless all ranks that have the tied parameters train them, or all freeze them.
// words[r][index] is the state on rank r. `text` names the parameters in the error.
void check_trained_alike(const std::vector<std::vector<int64_t>>& words, size_t index,
                         const std::string& text) {
  std::set<int64_t> kinds;
  for (const auto& of_rank : words) kinds.insert(of_rank[index]);
  kinds.erase(kNotHeld);
  if (kinds.size() < 2 && !kinds.contains(kMixed)) return;
  throw pipeline_refusal(
      format("the tied parameters {} require grad on some ranks or in some stages only; freeze or "
             "train all of them",
             text));
}

std::string text_of(const std::vector<StageParameter>& parameters) {
  std::string text;
  for (const StageParameter& parameter : parameters) {
    text += format("{}{}:{}", text.empty() ? "" : ", ", parameter.stage, parameter.name);
  }
  return text;
}

bool contains(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor) {
  return std::ranges::any_of(tensors,
                             [&](const at::Tensor& other) { return other.is_same(tensor); });
}

}  // namespace

TiedParameters::TiedParameters(PipelineRanks ranks, PrivateMessages messages, Stages stages)
    : ranks_(std::move(ranks)), messages_(std::move(messages)), stages_(std::move(stages)) {}

std::optional<Error> TiedParameters::find_holders(const std::vector<StageParameter>& parameters,
                                                  Tie& tie) const {
  if (parameters.size() < 2) return pipeline_refusal("at least two parameters can be tied");
  std::set<int> ranks;
  for (const StageParameter& parameter : parameters) {
    if (parameter.stage < 0 ||
        static_cast<size_t>(parameter.stage) >= stages_.rank_of_stage.size()) {
      return pipeline_refusal(
          format("cannot tie {}: there is no stage {}", parameter.name, parameter.stage));
    }
    ranks.insert(stages_.rank_of_stage[static_cast<size_t>(parameter.stage)]);
  }
  tie.root = stages_.rank_of_stage[static_cast<size_t>(parameters[0].stage)];
  tie.ranks.assign(ranks.begin(), ranks.end());
  for (const StageParameter& parameter : parameters) {
    const auto stage = std::ranges::find(stages_.own, parameter.stage, &PipelineStage::stage);
    if (stage == stages_.own.end()) continue;
    tie.stages.insert(parameter.stage);
    const auto found = std::ranges::find(stage->parameters(), parameter.name, &NamedTensor::name);
    if (found == stage->parameters().end()) {
      return pipeline_refusal(format("cannot tie {}: stage {} has no parameter of this name",
                                     parameter.name, parameter.stage));
    }
    for (const Tie& other : ties_) {
      if (!contains(other.own, found->tensor)) continue;
      return pipeline_refusal(
          format("cannot tie {}: \"{}\" of stage {} is tied already; name all parameters of a tie "
                 "in one call",
                 tie.text, parameter.name, parameter.stage));
    }
    if (const auto other = sharer_of_memory(*found)) {
      return pipeline_refusal(format(
          "cannot tie {}: \"{}\" of stage {} and \"{}\" of stage {} share memory, but are two "
          "tensors with two gradients; make them one tensor, or give them memory of their own",
          tie.text, parameter.name, parameter.stage, other->name, other->stage));
    }
    if (!contains(tie.own, found->tensor)) tie.own.push_back(found->tensor);
  }
  return std::nullopt;
}

std::optional<StageParameter> TiedParameters::sharer_of_memory(const NamedTensor& parameter) const {
  // Sharded stages may share memory, because only the pipeline uses the memory of their parameters.
  if (stages_.sharded != nullptr || parameter.tensor.numel() == 0) return std::nullopt;
  for (const PipelineStage& stage : stages_.own) {
    for (const NamedTensor& other : stage.parameters()) {
      if (other.tensor.is_same(parameter.tensor) || other.tensor.numel() == 0) continue;
      if (other.tensor.const_data_ptr() == parameter.tensor.const_data_ptr()) {
        return StageParameter{stage.stage(), other.name};
      }
    }
  }
  return std::nullopt;
}

void TiedParameters::check(const std::vector<StageParameter>& parameters, Tie& tie) const {
  const auto all = gather_words(ranks_.group, kPipelineCall, 2, [&]() -> std::vector<int64_t> {
    if (const auto refusal = find_holders(parameters, tie)) throw *refusal;
    return {static_cast<int64_t>(fnv1a(tie.text)), trained_word(tie.own)};
  });
  if (const auto other = first_unlike(all, 0)) {
    throw pipeline_refusal(
        format("ranks 0 and {} tie different parameters; pass the same list on all "
               "ranks (rank {}: {})",
               *other, ranks_.group.rank(), tie.text));
  }
  if (const auto difference = stages_.records->difference(parameters)) {
    throw pipeline_refusal(format("cannot tie {}: {}", tie.text, *difference));
  }
  check_trained_alike(all, 1, tie.text);
}

void TiedParameters::tie(const std::vector<StageParameter>& parameters) {
  Tie tie{.text = text_of(parameters)};
  agree_with_replicas(ranks_, {{"the list of parameters to tie", tie.text}},
                      refusal_of([&] { check(parameters, tie); }));
  const WholeStages whole(stages_.sharded, tie.stages);
  if (stages_.sharded != nullptr) {
    for (const at::Tensor& tensor : tie.own) stages_.sharded->keep_whole(tensor);
  }
  broadcast(tie);
  if (stages_.sharded != nullptr) {
    for (const int stage : tie.stages) stages_.sharded->take_from_parameters(stage);
  }
  ties_.push_back(std::move(tie));
  stages_.records->tie(parameters);
}

void TiedParameters::sum_gradients() const {
  if (ties_.empty()) return;
  const auto all = gather_words(ranks_.group, kPipelineCall, ties_.size(), [&] {
    std::vector<int64_t> uses;
    for (const Tie& tie : ties_) {
      const bool is_used = std::ranges::any_of(
          tie.own, [](const at::Tensor& parameter) { return parameter.grad().defined(); });
      uses.push_back(is_used ? 1 : 0);
    }
    return uses;
  });
  for (size_t i = 0; i < ties_.size(); ++i) {
    const bool is_used =
        std::ranges::any_of(all, [&](const auto& of_rank) { return of_rank[i] != 0; });
    if (is_used) sum_gradients(ties_[i]);
  }
}

void TiedParameters::check_equal() const {
  std::vector<int64_t> differs;
  for (const Tie& tie : ties_) {
    const WholeStages whole(stages_.sharded, tie.stages);
    differs.push_back(are_equal(tie) ? 0 : 1);
  }
  const auto all = gather_words(ranks_.group, kPipelineCall, ties_.size(), [&] { return differs; });
  for (size_t i = 0; i < ties_.size(); ++i) {
    for (int rank = 0; rank < ranks_.group.world_size(); ++rank) {
      if (all[static_cast<size_t>(rank)][i] == 0) continue;
      throw pipeline_refusal(
          format("the tied parameters {} differ: rank {} has other values than the "
                 "first of them; give them the same optimizer with the same options, and clip by "
                 "clip_grad_norm_(pipeline, ...), which has one norm on all ranks",
                 ties_[i].text, rank))
          .with_culprit(rank);
    }
  }
}

std::vector<int64_t> TiedParameters::trained_words() const {
  std::vector<int64_t> words;
  for (const Tie& tie : ties_) words.push_back(trained_word(tie.own));
  return words;
}

void TiedParameters::check_trained(const std::vector<std::vector<int64_t>>& words,
                                   size_t first) const {
  for (size_t i = 0; i < ties_.size(); ++i) check_trained_alike(words, first + i, ties_[i].text);
}

at::Tensor TiedParameters::from_root(const Tie& tie, const at::Tensor& tensor) const {
  if (ranks_.group.rank() != tie.root) {
    const at::Tensor received = at::empty_like(tensor, at::MemoryFormat::Contiguous);
    messages_.recv(received, tie.root);
    return received;
  }
  for (const int rank : tie.ranks) {
    if (rank != tie.root) messages_.send(tensor, rank);
  }
  return tensor;
}

void TiedParameters::broadcast(const Tie& tie) const {
  if (tie.own.empty()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor values = from_root(tie, tie.own[0].detach());
  for (const at::Tensor& parameter : tie.own) {
    if (parameter.data_ptr() != values.data_ptr()) parameter.copy_(values);
  }
}

void TiedParameters::sum_gradients(const Tie& tie) const {
  if (tie.own.empty()) return;
  const at::NoGradGuard no_grad;
  at::Tensor sum = at::zeros_like(tie.own[0], at::MemoryFormat::Contiguous);
  for (const at::Tensor& parameter : tie.own) {
    if (parameter.grad().defined()) sum.add_(parameter.grad());
  }
  if (ranks_.group.rank() != tie.root) {
    messages_.send(sum, tie.root);
  } else {
    const at::Tensor received = at::empty_like(sum);
    for (const int rank : tie.ranks) {
      if (rank == tie.root) continue;
      messages_.recv(received, rank);
      sum.add_(received);
    }
  }
  sum = from_root(tie, sum);
  for (const at::Tensor& parameter : tie.own) {
    if (parameter.requires_grad()) parameter.mutable_grad() = sum.clone();
  }
}

bool TiedParameters::are_equal(const Tie& tie) const {
  if (tie.own.empty()) return true;
  const at::NoGradGuard no_grad;
  const at::Tensor values = from_root(tie, tie.own[0].detach());
  return std::ranges::all_of(
      tie.own, [&](const at::Tensor& parameter) { return at::equal(parameter, values); });
}

}  // namespace cadre::parallel
