#include "cadre/core/base/printable.h"

#include "cadre/core/base/format.h"

namespace cadre {
namespace {

// Returns the length of the UTF-8 sequence that starts with this byte; 0 if none does.
size_t utf8_length(unsigned char first) {
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first < 0xe0) return 2;
  if (first >= 0xe0 && first < 0xf0) return 3;
  return first >= 0xf0 && first < 0xf5 ? 4 : 0;
}

// Rejects a second byte that makes the sequence overlong, a surrogate, or larger than U+10FFFF.
bool is_second_byte(unsigned char first, unsigned char second) {
  const unsigned char low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
  const unsigned char high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
  return second >= low && second <= high;
}

}  // namespace

bool is_utf8(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  for (size_t i = 0; i < text.size();) {
    const size_t length = utf8_length(byte(i));
    if (length == 0 || length > text.size() - i) return false;
    if (length > 1 && !is_second_byte(byte(i), byte(i + 1))) return false;
    for (size_t k = 2; k < length; ++k) {
      if ((byte(i + k) & 0xc0) != 0x80) return false;
    }
    i += length;
  }
  return true;
}

std::string printable(std::string_view text) {
  std::string shown;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0U;
    if ((byte < 0x20 && byte != '\t') || byte == 0x7f) {
      shown += format("\\x{:02x}", byte);
    } else if (byte == 0xc2 && next >= 0x80 && next < 0xa0) {  // U+0080 to U+009F: controls, too
      shown += format("\\x{:02x}\\x{:02x}", byte, next);
      ++i;
    } else {
      shown += text[i];
    }
  }
  return shown;
}

}  // namespace cadre
