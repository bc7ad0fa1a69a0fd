// The vocabulary and the merges of a byte-pair encoding.
//
// Threads: a value; const methods may be called from any thread. Blocking: never. Errors:
// kInvalidArgument.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace cadre::data {

using TokenId = int32_t;

// A text that is one token, and no word.
struct AddedToken {
  std::string text;
  TokenId id = 0;
  bool is_special = true;
  bool is_normalized = false;  // if true, it is looked for after those that are not
};

struct BpeModel {
  // The ids by the tokens' bytes, without those of added tokens that a file has.
  std::unordered_map<std::string, TokenId> ids;
  std::vector<std::string> tokens;  // the bytes by id; empty for ids without a token
  std::vector<std::pair<TokenId, TokenId>> merges;
  std::vector<AddedToken> added;
  bool adds_prefix_space = false;  // a text gets a space before it, unless it has one
};

// Encodes words.
class BpeEncoder {
 public:
  explicit BpeEncoder(const BpeModel& model);

  // Appends the ids of the word's tokens.
  void encode(std::string_view word, std::vector<int64_t>& ids) const;

 private:
  struct Merge {
    int32_t rank = 0;
    TokenId result = 0;
  };

  static uint64_t key_of(TokenId left, TokenId right) {
    return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) |
           static_cast<uint32_t>(right);
  }
  const Merge* merge_of(TokenId left, TokenId right) const;

  std::array<TokenId, 256> id_of_byte_{};  // -1 if a byte has no token
  std::unordered_map<uint64_t, Merge> merges_;
};

}  // namespace cadre::data
