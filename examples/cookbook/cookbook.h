// What the recipes share: the decoder, the text, its batches, and the line that a recipe prints.
// Every recipe trains the same decoder on the same batches, so all of them reach the same loss:
//   cadre run --nproc-per-node N ./cookbook_NAME TEXT [STEPS]    # a file, or a folder of texts
#pragma once

#include <cadre/cadre.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>

namespace cookbook {

using torch::Tensor;

inline constexpr cadre::TransformerOptions kSizes{.vocabulary = cadre::kVocabularySize,
                                                  .context = 64,
                                                  .embed_dim = 128,
                                                  .num_heads = 4,
                                                  .num_blocks = 6};
inline constexpr int64_t kBatchSize = 16;  // the rows of all ranks together
inline constexpr int64_t kNumHeldOut = 8;  // batches

// Returns the decoder, with the same weights on all ranks. The head has weights of its own.
inline torch::nn::Sequential make_decoder() {
  torch::manual_seed(0);
  torch::nn::Sequential decoder((cadre::TransformerEmbedding(kSizes)));
  for (int i = 0; i < kSizes.num_blocks; ++i) decoder->push_back(cadre::TransformerBlock(kSizes));
  decoder->push_back(cadre::TransformerHead(kSizes));
  return decoder;
}

inline torch::optim::AdamWOptions adamw() {
  return torch::optim::AdamWOptions(1e-3).weight_decay(0.1);
}

// The mean cross-entropy of logits (rows, tokens, vocabulary) and the tokens that follow.
inline Tensor loss_of(const Tensor& logits, const Tensor& next) {
  return torch::cross_entropy_loss(logits.flatten(0, 1), next.flatten());
}

class Run {
 public:
  // rows: the ranks that have different rows of a batch.
  Run(int argc, char** argv, const cadre::ProcessGroup& world, const cadre::ProcessGroup& rows)
      : world_(world), rows_(rows), num_steps_(argc > 2 ? std::atoi(argv[2]) : 100) {
    torch::set_num_threads(1);
    const auto corpus = std::make_shared<const cadre::TextCorpus>(
        cadre::TextCorpus::open(argc > 1 ? argv[1] : "docs", {.suffixes = {".md", ".txt"}}));
    const cadre::TextSplit split = cadre::split_by_position(*corpus, 0.1);
    train_ = std::make_shared<const cadre::TextDataset>(corpus, split.train, kSizes.context);
    held_out_ = std::make_shared<const cadre::TextDataset>(corpus, split.held_out, kSizes.context);
  }

  // Calls step(tokens, next) for this rank's rows (rows, tokens) of each batch.
  template <typename Step>
  void train(const Step& step) {
    cadre::DataLoader loader(train_, {.batch_size = kBatchSize, .ranks = rows_, .drop_last = true});
    for (int epoch = 0, done = 0; done < num_steps_; ++epoch) {
      for (const auto& [tokens, next] : loader.epoch(epoch)) {
        if (done == 1) begin_ = std::chrono::steady_clock::now();  // the first step is a warm-up
        step(tokens, next);
        if (++done == num_steps_) break;
      }
    }
    seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

  // Prints the result of the run. loss(tokens, next) returns the mean loss of this rank's rows of a
  // batch that was held out.
  template <typename Loss>
  void report(const char* name, const Loss& loss) const {
    const torch::NoGradGuard no_grad;
    cadre::DataLoader loader(held_out_,
                             {.batch_size = kBatchSize, .ranks = rows_, .shuffle = false});
    Tensor sum = torch::zeros({}, torch::kDouble);
    int64_t num_batches = 0;
    for (const auto& [tokens, next] : loader.epoch(0)) {
      sum += loss(tokens, next);
      if (++num_batches == kNumHeldOut) break;
    }
    rows_.all_reduce(sum);  // the shares of all ranks are equal
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    const Tensor peak = torch::tensor(static_cast<double>(usage.ru_maxrss) / 1024, torch::kDouble);
    world_.all_reduce(peak, {.op = cadre::ReduceOp::kMax});
    if (world_.rank() != 0) return;
    std::printf(
        "{\"recipe\": \"%s\", \"ranks\": %d, \"held_out_loss\": %.9f, "
        "\"tokens_per_second\": %.1f, \"peak_mib\": %.1f}\n",
        name, world_.world_size(),
        sum.item<double>() / static_cast<double>(num_batches * rows_.world_size()),
        (num_steps_ - 1) * static_cast<double>(kBatchSize * kSizes.context) / seconds_,
        peak.item<double>());
  }

 private:
  const cadre::ProcessGroup& world_;
  const cadre::ProcessGroup& rows_;
  int num_steps_;
  std::shared_ptr<const cadre::TextDataset> train_, held_out_;
  std::chrono::steady_clock::time_point begin_;
  double seconds_ = 0;
};

}  // namespace cookbook
