// Fuzzes the parser of headers from the network: it must parse or return an error, and a parsed
// header must encode to the same bytes.
#include "cadre/core/collective/net/message.h"

#include <algorithm>
#include <cstdlib>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using cadre::OperationHeader;
  if (size < OperationHeader::kBytes) return 0;
  const cadre::ConstBytes bytes(reinterpret_cast<const std::byte*>(data), OperationHeader::kBytes);
  const auto header = OperationHeader::parse(bytes);
  if (header.ok() && !std::ranges::equal(header->encode(), bytes)) std::abort();
  return 0;
}
