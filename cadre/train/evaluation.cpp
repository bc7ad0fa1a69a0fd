#include "cadre/train/evaluation.h"

#include <torch/torch.h>

#include <algorithm>
#include <vector>

#include "cadre/data/bigram.h"
#include "cadre/data/data_loader.h"

namespace cadre::train {
namespace {

constexpr int64_t kBatchSizePerRank = 16;

TokenRange first_tokens(const TokenRange& range, int64_t count) {
  return {range.begin, std::min(range.end, range.begin + count)};
}

}  // namespace

HeldOut::HeldOut(std::shared_ptr<const TextCorpus> corpus, const TokenRange& range, int64_t context,
                 int64_t num_tokens)
    : dataset_(corpus, first_tokens(range, num_tokens), context),
      // Of the samples exactly: a rest shorter than one sample is neither evaluated nor counted.
      bigram_entropy_(bigram_conditional_entropy(
          *corpus, first_tokens(range, dataset_.size() * context + 1))) {}

double HeldOut::evaluate(LanguageModel& model, ReplicaGroup& replicas) const {
  const torch::NoGradGuard no_grad;
  const bool was_training = model.is_training();
  model.eval();
  const int world_size = replicas.world_size();
  DataLoader loader(std::make_shared<const TextDataset>(dataset_),
                    {.batch_size = kBatchSizePerRank * world_size,
                     .rank = replicas.rank(),
                     .world_size = world_size,
                     .shuffle = false});
  at::Tensor sums = torch::zeros({2}, torch::kFloat64);  // of losses, and of samples
  for (const auto& [tokens, targets] : loader.epoch(0)) {
    const auto num_samples = static_cast<double>(tokens.size(0));
    if (num_samples == 0) continue;
    const double loss = next_token_loss(model.forward(tokens), targets).item<double>();
    sums += torch::tensor({loss * num_samples, num_samples}, torch::kFloat64);
  }
  replicas.all_reduce_async(sums, ReduceOp::kSum)();
  model.train(was_training);
  return sums[0].item<double>() / sums[1].item<double>();
}

}  // namespace cadre::train
