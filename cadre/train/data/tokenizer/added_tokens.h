// The division of a text at the added tokens that occur in it.
//
// Threads: plain values; const methods may be called from any thread. Blocking: never. Lifetime:
// parts are views of the text. Errors: none.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/train/data/tokenizer/bpe_model.h"

namespace cadre::data {

class AddedTokens {
 public:
  AddedTokens() = default;
  explicit AddedTokens(std::vector<AddedToken> tokens);

  // Calls take_text for the text between added tokens, and take_token for each of them, in order.
  // If several tokens begin at one place, takes the longest.
  void divide(std::string_view text, const std::function<void(std::string_view)>& take_text,
              const std::function<void(const AddedToken&)>& take_token) const;

 private:
  std::vector<AddedToken> tokens_;  // the longest first
  std::array<bool, 256> begins_{};  // whether a token begins with the byte
};

}  // namespace cadre::data
