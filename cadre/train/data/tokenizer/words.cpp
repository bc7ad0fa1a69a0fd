#include "cadre/train/data/tokenizer/words.h"

#include <array>
#include <cstddef>

#include "cadre/train/data/tokenizer/unicode_classes.h"

namespace cadre::data {
namespace {

struct Character {
  char32_t code = 0;
  size_t num_bytes = 1;
  bool is_valid = false;  // whether the bytes are valid UTF-8
};

// Decodes the character at the begin of a text that is not empty.
Character character_at(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return {.code = first, .num_bytes = 1, .is_valid = true};
  const size_t num_bytes = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < num_bytes) return {};
  auto code = static_cast<char32_t>(first & (0x7f >> num_bytes));
  for (size_t i = 1; i < num_bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return {};
    code = (code << 6) | (byte(i) & 0x3fU);
  }
  constexpr std::array<char32_t, 5> kSmallest = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = code >= 0xd800 && code < 0xe000;
  if (code < kSmallest[num_bytes] || code > 0x10ffff || is_surrogate) return {};
  return {.code = code, .num_bytes = num_bytes, .is_valid = true};
}

CharacterClass class_of_character(const Character& character) {
  return character.is_valid ? class_of(character.code) : CharacterClass::kOther;
}

// Returns the number of bytes of the characters of this class at the begin of the text.
size_t run_of(std::string_view text, CharacterClass wanted) {
  size_t size = 0;
  while (size < text.size()) {
    const Character next = character_at(text.substr(size));
    if (class_of_character(next) != wanted) break;
    size += next.num_bytes;
  }
  return size;
}

// Returns the size of the spaces at the begin of the text that form a word: all of them at the end
// of the text, else all but the last, unless there is only one.
size_t run_of_spaces(std::string_view text) {
  size_t size = 0;
  size_t before_last = 0;
  while (size < text.size()) {
    const Character next = character_at(text.substr(size));
    if (class_of_character(next) != CharacterClass::kSpace) break;
    before_last = size;
    size += next.num_bytes;
  }
  return size == text.size() || before_last == 0 ? size : before_last;
}

// Returns the size of the first word of a text that is not empty.
size_t first_word(std::string_view text) {
  for (const std::string_view ending : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
    if (text.starts_with(ending)) return ending.size();
  }
  const size_t space = text.front() == ' ' ? 1 : 0;
  if (space < text.size()) {
    const std::string_view rest = text.substr(space);
    const CharacterClass kind = class_of_character(character_at(rest));
    if (kind != CharacterClass::kSpace) return space + run_of(rest, kind);
  }
  return run_of_spaces(text);
}

void append_utf8(std::string& text, char32_t code) {
  if (code < 0x80) {
    text += static_cast<char>(code);
    return;
  }
  text += static_cast<char>(0xc0 | (code >> 6));  // the names of bytes are below 0x800
  text += static_cast<char>(0x80 | (code & 0x3f));
}

// The printable characters of Latin-1 stand for themselves; the other bytes get the characters from
// 256 on, in their order.
constexpr std::array<char32_t, 256> characters_of_bytes() {
  std::array<char32_t, 256> characters{};
  char32_t next = 256;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool is_printable =
        (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || (byte >= 174 && byte <= 255);
    characters[byte] = is_printable ? byte : next++;
  }
  return characters;
}

constexpr std::array<char32_t, 256> kCharacterOfByte = characters_of_bytes();
constexpr size_t kNumCharacters = 256 + 68;  // 68 bytes are not printable

constexpr std::array<int, kNumCharacters> bytes_of_characters() {
  std::array<int, kNumCharacters> bytes{};
  for (int& byte : bytes) byte = -1;
  for (size_t byte = 0; byte < 256; ++byte) {
    bytes[kCharacterOfByte[byte]] = static_cast<int>(byte);
  }
  return bytes;
}

constexpr std::array<int, kNumCharacters> kByteOfCharacter = bytes_of_characters();

}  // namespace

void for_each_word(std::string_view text, const std::function<void(std::string_view word)>& take) {
  while (!text.empty()) {
    const size_t size = first_word(text);
    take(text.substr(0, size));
    text.remove_prefix(size);
  }
}

std::string name_of_bytes(std::string_view bytes) {
  std::string name;
  for (const char byte : bytes)
    append_utf8(name, kCharacterOfByte[static_cast<unsigned char>(byte)]);
  return name;
}

std::optional<std::string> bytes_of_name(std::string_view name) {
  std::string bytes;
  while (!name.empty()) {
    const Character next = character_at(name);
    if (!next.is_valid || next.code >= kNumCharacters || kByteOfCharacter[next.code] < 0) {
      return std::nullopt;
    }
    bytes += static_cast<char>(kByteOfCharacter[next.code]);
    name.remove_prefix(next.num_bytes);
  }
  return bytes;
}

}  // namespace cadre::data
