// The division of a text into words, within which tokens are merged, and the names of bytes in
// files of byte-level vocabularies.
//
// Threads: pure functions. Blocking: never. Lifetime: words are views of the text. Errors: none.
// Source: Radford et al., "Language models are unsupervised multitask learners", 2019, and the
// ByteLevel pre-tokenizer of Hugging Face's tokenizers, which divide a text by the expression
// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace cadre::data {

// Calls `take` for each word of the text, in order; together they are the text. A byte that is not
// part of a valid UTF-8 sequence counts as a character that is no letter, number or space.
void for_each_word(std::string_view text, const std::function<void(std::string_view word)>& take);

// Returns the text that stands for the bytes in a vocabulary: each byte is one printable character,
// for example "Ġ" for a space.
std::string name_of_bytes(std::string_view bytes);

// Returns the bytes for which the text stands; nullopt if it has a character that no byte has.
std::optional<std::string> bytes_of_name(std::string_view name);

}  // namespace cadre::data
