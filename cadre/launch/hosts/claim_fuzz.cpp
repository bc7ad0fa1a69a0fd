// Fuzzes the text of a claim. Every claim that is accepted must be the same after it was written
// and read again.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "cadre/launch/hosts/claim.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using cadre::launch::decode_claim;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const auto claim = decode_claim("job", input, "the input");
  if (!claim.ok()) return 0;
  const auto again = decode_claim("job", encode_claim("job", *claim), "the output");
  if (!again.ok() || *again != *claim) std::abort();
  return 0;
}
