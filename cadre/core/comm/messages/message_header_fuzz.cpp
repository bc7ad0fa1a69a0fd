// Fuzzes MessageHeader::parse(). It must parse or return an error, and a header that was parsed
// must encode to the same bytes.
#include <algorithm>
#include <cstdlib>

#include "cadre/core/comm/messages/message_header.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using cadre::MessageHeader;
  if (size < MessageHeader::kBytes) return 0;
  const cadre::ConstBytes bytes(reinterpret_cast<const std::byte*>(data), MessageHeader::kBytes);
  const auto header = MessageHeader::parse(bytes);
  if (header.ok() && !std::ranges::equal(header->encode(), bytes)) std::abort();
  return 0;
}
