// The classes of characters by which words are divided.
//
// Threads: a pure function. Blocking: never. Errors: none. Source: the Unicode Character Database
// 16.0: the general categories L and N, and the property White_Space.
#pragma once

#include <cstdint>

namespace cadre::data {

enum class CharacterClass : uint8_t { kLetter, kNumber, kSpace, kOther };

CharacterClass class_of(char32_t character);

}  // namespace cadre::data
