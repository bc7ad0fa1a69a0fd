#include "cadre/train/data/bigram.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre {
namespace {

constexpr int64_t kChunkTokens = int64_t{1} << 16;

// Returns counts[current * V + next] for all pairs of adjacent tokens in the range.
std::vector<int64_t> count_pairs(const TextCorpus& corpus, const TokenRange& range) {
  std::vector<int64_t> counts(static_cast<size_t>(kVocabularySize * kVocabularySize));
  std::vector<int64_t> tokens;
  for (int64_t begin = range.begin; begin + 1 < range.end; begin += kChunkTokens) {
    // The chunk includes the first token of the next chunk, so that the pair across the boundary is
    // counted.
    tokens.resize(static_cast<size_t>(std::min(kChunkTokens + 1, range.end - begin)));
    corpus.copy_tokens(begin, tokens);
    for (size_t i = 0; i + 1 < tokens.size(); ++i) {
      ++counts[static_cast<size_t>(tokens[i] * kVocabularySize + tokens[i + 1])];
    }
  }
  return counts;
}

}  // namespace

double bigram_conditional_entropy(const TextCorpus& corpus, const TokenRange& range) {
  if (range.begin < 0 || range.end > corpus.num_tokens() || range.end - 2 < range.begin) {
    throw Error(
        ErrorCode::kInvalidArgument,
        cadre::format("bigram_conditional_entropy: tokens [{}, {}) of {}; expected at least "
                      "two tokens of the text",
                      range.begin, range.end, corpus.num_tokens()));
  }
  const std::vector<int64_t> counts = count_pairs(corpus, range);
  double nats = 0;
  for (int64_t current = 0; current < kVocabularySize; ++current) {
    const std::span row = std::span(counts).subspan(static_cast<size_t>(current * kVocabularySize),
                                                    static_cast<size_t>(kVocabularySize));
    int64_t total = 0;
    for (const int64_t count : row) total += count;
    for (const int64_t count : row) {
      if (count == 0) continue;
      const auto n = static_cast<double>(count);
      nats -= n * std::log(n / static_cast<double>(total));
    }
  }
  return nats / static_cast<double>(range.size() - 1);
}

}  // namespace cadre
