#include "cadre/train/data/tokenizer/bpe_model.h"

#include <queue>
#include <tuple>

#include "cadre/core/base/error.h"
#include "cadre/core/base/format.h"

namespace cadre::data {

BpeEncoder::BpeEncoder(const BpeModel& model) {
  for (size_t byte = 0; byte < id_of_byte_.size(); ++byte) {
    const auto found = model.ids.find(std::string(1, static_cast<char>(byte)));
    id_of_byte_[byte] = found == model.ids.end() ? -1 : found->second;
  }
  int32_t rank = 0;
  for (const auto& [left, right] : model.merges) {
    const auto index = [](TokenId id) { return static_cast<size_t>(id); };
    const std::string merged = model.tokens[index(left)] + model.tokens[index(right)];
    merges_[key_of(left, right)] = {.rank = rank++, .result = model.ids.at(merged)};
  }
}

const BpeEncoder::Merge* BpeEncoder::merge_of(TokenId left, TokenId right) const {
  const auto found = merges_.find(key_of(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

// A queue holds the pairs that can be merged, by rank, then by place. A pair of which a token was
// merged meanwhile is recognized by its tokens. Costs O(n log n) for n bytes.
void BpeEncoder::encode(std::string_view word, std::vector<int64_t>& ids) const {
  struct Symbol {
    TokenId id;  // -1 if it was merged into the symbol before it
    int64_t before;
    int64_t after;
  };
  std::vector<Symbol> symbols;
  const int64_t size = std::ssize(word);
  for (int64_t i = 0; i < size; ++i) {
    const auto byte = static_cast<unsigned char>(word[static_cast<size_t>(i)]);
    if (id_of_byte_[byte] < 0) {
      throw Error(ErrorCode::kInvalidArgument,
                  cadre::format("Tokenizer: the vocabulary has no token for the byte 0x{:02x} at "
                                "position {} of a word of {} bytes; use a vocabulary with all "
                                "bytes",
                                int{byte}, i, size));
    }
    symbols.push_back({.id = id_of_byte_[byte], .before = i - 1, .after = i + 1});
  }
  const auto at = [&](int64_t i) -> Symbol& { return symbols[static_cast<size_t>(i)]; };
  using Candidate = std::tuple<int32_t, int64_t, TokenId, TokenId>;  // rank, place, both tokens
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates;
  const auto consider = [&](int64_t left) {
    if (left < 0 || at(left).after >= size) return;
    const TokenId right_id = at(at(left).after).id;
    if (const Merge* merge = merge_of(at(left).id, right_id)) {
      candidates.emplace(merge->rank, left, at(left).id, right_id);
    }
  };
  for (int64_t i = 0; i < size; ++i) consider(i);
  while (!candidates.empty()) {
    const auto [rank, left, left_id, right_id] = candidates.top();
    candidates.pop();
    const int64_t right = at(left).after;
    if (at(left).id != left_id || right >= size || at(right).id != right_id) continue;
    at(left).id = merge_of(left_id, right_id)->result;
    at(left).after = at(right).after;
    at(right).id = -1;
    if (at(left).after < size) at(at(left).after).before = left;
    consider(at(left).before);
    consider(left);
  }
  for (int64_t i = 0; i < size; i = at(i).after) ids.push_back(at(i).id);
}

}  // namespace cadre::data
