#include "cadre/train/data/tokenizer/added_tokens.h"

#include <algorithm>
#include <utility>

namespace cadre::data {

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::ranges::stable_sort(tokens_, std::ranges::greater(),
                           [](const AddedToken& token) { return token.text.size(); });
  for (const AddedToken& token : tokens_) {
    begins_[static_cast<unsigned char>(token.text.front())] = true;
  }
}

void AddedTokens::divide(std::string_view text,
                         const std::function<void(std::string_view)>& take_text,
                         const std::function<void(const AddedToken&)>& take_token) const {
  size_t begin = 0;  // where the text begins that was not taken yet
  for (size_t i = 0; i < text.size();) {
    const auto found = begins_[static_cast<unsigned char>(text[i])]
                           ? std::ranges::find_if(tokens_,
                                                  [rest = text.substr(i)](const AddedToken& token) {
                                                    return rest.starts_with(token.text);
                                                  })
                           : tokens_.end();
    if (found == tokens_.end()) {
      ++i;
      continue;
    }
    if (i > begin) take_text(text.substr(begin, i - begin));
    take_token(*found);
    i += found->text.size();
    begin = i;
  }
  if (text.size() > begin) take_text(text.substr(begin));
}

}  // namespace cadre::data
