#include "cadre/train/data/tokenizer/bpe_trainer.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <queue>
#include <set>
#include <unordered_set>
#include <utility>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"
#include "cadre/core/base/printable.h"
#include "cadre/train/data/tokenizer/added_tokens.h"
#include "cadre/train/data/tokenizer/words.h"

namespace cadre::data {
namespace {

constexpr int64_t kMaxVocabulary = int64_t{1} << 24;

using Pair = std::pair<TokenId, TokenId>;

// The words of the texts as sequences of tokens, and how often each pair of tokens occurs.
class MergedWords {
 public:
  // Words in the order of their bytes, so that nothing depends on the order of a hash table.
  MergedWords(const std::map<std::string, int64_t>& counts, const BpeModel& model) {
    for (const auto& [text, count] : counts) {
      Word word{.tokens = {}, .count = count};
      for (const char byte : text) word.tokens.push_back(model.ids.at(std::string(1, byte)));
      words_.push_back(std::move(word));
    }
    for (size_t i = 0; i < words_.size(); ++i) count_pairs(i, 1);
    for (const auto& [pair, state] : pairs_) candidates_.emplace(state.count, pair);
  }

  // Returns the most frequent pair, of equally frequent ones the lowest, and how often it occurs.
  std::pair<Pair, int64_t> best() {
    while (!candidates_.empty()) {
      const auto [count, pair] = candidates_.top();
      if (pairs_[pair].count == count) return {pair, count};
      candidates_.pop();  // its count has changed since; the present one is in the queue
    }
    return {{}, 0};
  }

  void merge(const Pair& pair, TokenId result) {
    changed_.clear();
    const std::set<size_t> words = std::move(pairs_[pair].words);
    for (const size_t index : words) {
      count_pairs(index, -1);
      std::vector<TokenId>& tokens = words_[index].tokens;
      size_t out = 0;
      for (size_t i = 0; i < tokens.size(); ++out) {
        const bool is_pair =
            i + 1 < tokens.size() && tokens[i] == pair.first && tokens[i + 1] == pair.second;
        tokens[out] = is_pair ? result : tokens[i];
        i += is_pair ? 2 : 1;
      }
      tokens.resize(out);
      count_pairs(index, 1);
    }
    pairs_[pair].count = 0;
    for (const Pair& each : changed_) candidates_.emplace(pairs_[each].count, each);
  }

 private:
  struct Word {
    std::vector<TokenId> tokens;
    int64_t count = 0;
  };
  struct PairState {
    int64_t count = 0;
    std::set<size_t> words;  // indices of words that have, or had, the pair
  };
  struct Less {
    bool operator()(const std::pair<int64_t, Pair>& a, const std::pair<int64_t, Pair>& b) const {
      return a.first != b.first ? a.first < b.first : a.second > b.second;
    }
  };

  // Adds the word's pairs to the counts, or takes them away.
  void count_pairs(size_t index, int64_t sign) {
    const Word& word = words_[index];
    for (size_t i = 0; i + 1 < word.tokens.size(); ++i) {
      const Pair pair{word.tokens[i], word.tokens[i + 1]};
      PairState& state = pairs_[pair];
      state.count += sign * word.count;
      if (sign > 0) state.words.insert(index);
      changed_.insert(pair);
    }
  }

  std::vector<Word> words_;
  std::map<Pair, PairState> pairs_;
  std::set<Pair> changed_;  // pairs whose counts the last merge has changed
  std::priority_queue<std::pair<int64_t, Pair>, std::vector<std::pair<int64_t, Pair>>, Less>
      candidates_;
};

void add_token(BpeModel& model, const std::string& bytes) {
  model.ids.emplace(bytes, static_cast<TokenId>(model.tokens.size()));
  model.tokens.push_back(bytes);
}

// Returns the special tokens and the bytes, which come in the order of their names.
BpeModel first_tokens(const std::vector<std::string>& special_tokens) {
  BpeModel model;
  for (const std::string& token : special_tokens) {
    model.added.push_back({.text = token, .id = static_cast<TokenId>(model.tokens.size())});
    add_token(model, token);
  }
  std::map<std::string, std::string> bytes_by_name;
  for (int byte = 0; byte < 256; ++byte) {
    const std::string bytes(1, static_cast<char>(byte));
    bytes_by_name.emplace(name_of_bytes(bytes), bytes);
  }
  for (const auto& [name, bytes] : bytes_by_name) {
    if (!model.ids.contains(bytes)) add_token(model, bytes);
  }
  return model;
}

}  // namespace

BpeTrainer::BpeTrainer(const TokenizerTrainingOptions& options) : options_(options) {
  std::unordered_set<std::string> seen;
  for (const std::string& token : options.special_tokens) {
    if (token.size() < 2 || !is_utf8(token) || !seen.insert(token).second) {
      throw Error(ErrorCode::kInvalidArgument,
                  cadre::format("Tokenizer::train: the special token \"{}\" is given twice, is no "
                                "valid UTF-8, or has fewer than 2 bytes",
                                printable(token)));
    }
  }
  const int64_t smallest = 256 + std::ssize(options.special_tokens);
  if (options.vocabulary_size < smallest || options.vocabulary_size > kMaxVocabulary ||
      options.min_frequency < 1) {
    throw Error(
        ErrorCode::kInvalidArgument,
        cadre::format("Tokenizer::train: a vocabulary_size of {} and a min_frequency of {}; "
                      "expected {} (256 bytes and the special tokens) to {} tokens, and at "
                      "least 1",
                      options.vocabulary_size, options.min_frequency, smallest, kMaxVocabulary));
  }
}

void BpeTrainer::add(std::string_view text) {
  std::vector<AddedToken> special;
  for (const std::string& token : options_.special_tokens) special.push_back({.text = token});
  AddedTokens(std::move(special))
      .divide(
          text,
          [this](std::string_view part) {
            for_each_word(part, [this](std::string_view word) { ++counts_[std::string(word)]; });
          },
          [](const AddedToken&) {});
}

BpeModel BpeTrainer::train() const {
  BpeModel model = first_tokens(options_.special_tokens);
  MergedWords words({counts_.begin(), counts_.end()}, model);
  while (std::ssize(model.tokens) < options_.vocabulary_size) {
    const auto [pair, count] = words.best();
    if (count < options_.min_frequency) break;
    const std::string bytes = model.tokens[static_cast<size_t>(pair.first)] +
                              model.tokens[static_cast<size_t>(pair.second)];
    if (!model.ids.contains(bytes)) add_token(model, bytes);
    model.merges.push_back(pair);
    words.merge(pair, model.ids.at(bytes));
  }
  return model;
}

}  // namespace cadre::data
