#include "cadre/train/trainer/tasks/text_task.h"

#include <algorithm>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/train/data/bigram.h"
#include "cadre/train/trainer/models/language_model.h"
#include "cadre/train/trainer/tasks/text_sample.h"
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

}  // namespace

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
  // Counts only whole samples: a rest that is shorter than a sample is not evaluated either.
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

}  // namespace cadre::train
