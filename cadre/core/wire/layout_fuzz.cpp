// Fuzzes the parsers of tickets and layouts: they must return a value or an error, and a decoded
// value must be equal after encoding and decoding.
#include <cstdlib>

#include "cadre/core/wire/byte_codec.h"
#include "cadre/core/wire/layout.h"

namespace cadre {
namespace {

void decode(ConstBytes input) {
  if (const auto ticket = wire::decode_ticket(wire::as_text(input)); ticket.ok()) {
    if (wire::encode_ticket(*ticket) != wire::as_text(input)) std::abort();
  }
  if (const auto layout = wire::decode_layout(input); layout.ok()) {
    const std::vector<std::byte> encoded =
        wire::encode_layout(layout->rank_addresses, layout->settings);
    const ConstBytes bytes = encoded;
    const auto size = wire::decode_layout_prefix(bytes.first(wire::kLayoutPrefixBytes));
    if (!size.ok() && bytes.size() <= wire::kMaxLayoutBytes) std::abort();
    const auto again = wire::decode_layout(bytes.subspan(wire::kLayoutPrefixBytes));
    if (!again.ok() || *again != *layout) std::abort();
  }
  (void)wire::decode_layout_prefix(input);
}

}  // namespace
}  // namespace cadre

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  cadre::decode({reinterpret_cast<const std::byte*>(data), size});
  return 0;
}
