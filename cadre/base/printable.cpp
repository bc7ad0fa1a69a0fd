#include "cadre/base/printable.h"

#include "cadre/base/format.h"

namespace cadre {

std::string printable(std::string_view text) {
  std::string shown;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0U;
    if ((byte < 0x20 && byte != '\t') || byte == 0x7f) {
      shown += format("\\x{:02x}", byte);
    } else if (byte == 0xc2 && next >= 0x80 && next < 0xa0) {  // U+0080 to U+009F in UTF-8
      shown += format("\\x{:02x}\\x{:02x}", byte, next);
      ++i;
    } else {
      shown += text[i];
    }
  }
  return shown;
}

}  // namespace cadre
