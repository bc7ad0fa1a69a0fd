#include "cadre/wire/blake2b.h"

#include <openssl/evp.h>

#include <array>
#include <span>

#include "cadre/wire/hex.h"

namespace cadre::wire {

Result<std::string> blake2b_hex(ConstBytes bytes) {
  std::array<unsigned char, kBlake2bHexDigits / 2> digest;
  size_t num_bytes = 0;
  if (EVP_Q_digest(nullptr, "BLAKE2B-512", nullptr, bytes.data(), bytes.size(), digest.data(),
                   &num_bytes) != 1 ||
      num_bytes != digest.size()) {
    return Error(
        ErrorCode::kInternal,
        "OpenSSL could not compute BLAKE2b-512; check that its default provider is enabled");
  }
  return to_hex(std::as_bytes(std::span(digest)));
}

}  // namespace cadre::wire
