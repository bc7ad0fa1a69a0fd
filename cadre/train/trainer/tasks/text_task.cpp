#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/train/data/bigram.h"
#include "cadre/train/data/text_corpus.h"
#include "cadre/train/data/text_dataset.h"
#include "cadre/train/trainer/models/language_model.h"
#include "cadre/train/trainer/tasks/task.h"
#include "cadre/train/trainer/tasks/text_source.h"

namespace cadre::train {
namespace {

TokenRange first_tokens(const TokenRange& range, int64_t count) {
  return {range.begin, std::min(range.end, range.begin + count)};
}

void check_size(std::string_view part, const TokenRange& range, const Config& config) {
  if (range.size() > config.model.context) return;
  throw Error(ErrorCode::kInvalidArgument,
              cadre::format("data.path: the {} text has {} tokens, but one sample takes "
                            "model.context + 1, which is {}: provide more text, or change "
                            "data.held_out, which is {}, or model.context",
                            part, range.size(), config.model.context + 1, config.data.held_out));
}

// Draws a token from logits of shape (V).
int64_t draw(const at::Tensor& logits, const SampleConfig& config, at::Generator& generator) {
  if (config.temperature == 0) return logits.argmax().item<int64_t>();
  const int64_t num_candidates =
      config.top_k == 0 ? logits.numel() : std::min(config.top_k, logits.numel());
  const auto [values, tokens] = logits.topk(num_candidates);
  // Subtracts the largest logit first, so that no quotient can be positive infinity.
  const at::Tensor scaled = (values - values[0]) / config.temperature;
  const at::Tensor choice =
      torch::multinomial(torch::softmax(scaled, 0), 1, /*replacement=*/false, generator);
  return tokens[choice.item<int64_t>()].item<int64_t>();
}

// Generates text with a model, in one forward for each token. Continues the prompt by config.tokens
// tokens, or until <|endoftext|>, and returns prompt and continuation. Equal seeds and parameters
// give equal text, which may contain bytes that are not valid UTF-8. `context` is the largest
// number of tokens that the model accepts.
std::string sample_text(const Inference& infer, int64_t context, const SampleConfig& config,
                        uint64_t seed) {
  const torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  // Every document of the corpus follows this token, so the prompt begins with it.
  std::vector<int64_t> tokens = {kEndOfText};
  for (const char byte : config.prompt) tokens.push_back(static_cast<unsigned char>(byte));
  std::string text = config.prompt;
  for (int64_t i = 0; i < config.tokens; ++i) {
    const auto length = std::min(static_cast<int64_t>(tokens.size()), context);
    const at::Tensor window = torch::tensor(
        at::IntArrayRef(tokens).slice(tokens.size() - static_cast<size_t>(length)), torch::kLong);
    const at::Tensor logits = infer(window.unsqueeze(0))[0][length - 1].to(at::kCPU);
    const int64_t token = draw(logits, config, generator);
    if (token == kEndOfText) break;
    tokens.push_back(token);
    text += static_cast<char>(token);
  }
  return text;
}

// Predicts the next token of a text.
class TextTask : public Task {
 public:
  TextTask(const Config& config, Deadline deadline);

  std::shared_ptr<Model> make_model() const override;
  std::shared_ptr<const Dataset> training_data() const override { return training_data_; }
  // Returns a dataset of the first run.evaluate_tokens tokens of the held-out text.
  std::shared_ptr<const Dataset> held_out_data() const override { return held_out_data_; }
  DataIdentity data_identity() const override;
  bool data_are_unchanged() const override { return corpus_->is_unchanged(); }
  void check_data() const override { corpus_->check_unchanged(); }
  at::Tensor loss(const at::Tensor& output, const at::Tensor& target) const override;
  bool is_classification() const override { return false; }
  // The entropy is computed from exactly the tokens of held_out_data().
  std::optional<double> bigram_entropy() const override { return bigram_entropy_; }
  std::string sample(const Inference& infer) const override;
  std::string data_text() const override;
  std::string_view item_name() const override { return "tokens"; }
  int64_t items_per_sample() const override { return config_.model.context; }

 private:
  Config config_;
  std::shared_ptr<const TextCorpus> corpus_;
  TextSplit split_;
  std::shared_ptr<const TextDataset> training_data_;
  std::shared_ptr<const TextDataset> held_out_data_;
  double bigram_entropy_ = 0;
};

TextTask::TextTask(const Config& config, Deadline deadline)
    : config_(config),
      corpus_(std::make_shared<const TextCorpus>(open_text(config.data, deadline))),
      split_(split_by_position(*corpus_, config.data.held_out)) {
  const int64_t context = config.model.context;
  check_size("training", split_.train, config);
  check_size("held-out", split_.held_out, config);
  const TokenRange evaluated = first_tokens(split_.held_out, config.run.evaluate_tokens);
  training_data_ = std::make_shared<const TextDataset>(corpus_, split_.train, context);
  held_out_data_ = std::make_shared<const TextDataset>(corpus_, evaluated, context);
  // Uses only the tokens of whole samples, because a shorter rest is not evaluated either.
  bigram_entropy_ = bigram_conditional_entropy(
      *corpus_, first_tokens(evaluated, held_out_data_->size() * context + 1));
  corpus_->check_unchanged();
}

std::shared_ptr<Model> TextTask::make_model() const {
  return make_language_model(config_.model, kVocabularySize,
                             static_cast<uint64_t>(config_.run.seed));
}

DataIdentity TextTask::data_identity() const {
  return {.size = corpus_->num_tokens(), .fingerprint = corpus_->fingerprint()};
}

at::Tensor TextTask::loss(const at::Tensor& output, const at::Tensor& target) const {
  return next_token_loss(output, target);
}

std::string TextTask::sample(const Inference& infer) const {
  if (config_.sample.tokens == 0) return "";
  return sample_text(infer, config_.model.context, config_.sample,
                     static_cast<uint64_t>(config_.run.seed));
}

std::string TextTask::data_text() const {
  return cadre::format("{} tokens of {} files", split_.train.size(), corpus_->num_files());
}

}  // namespace

std::unique_ptr<Task> make_text_task(const Config& config, Deadline deadline) {
  return std::make_unique<TextTask>(config, deadline);
}

}  // namespace cadre::train
