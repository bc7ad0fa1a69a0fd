#include "cadre/wire/blake2b.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <memory>
#include <span>

#include "cadre/wire/hex.h"

namespace cadre::wire {

Result<std::string> blake2b_hex(std::span<const ConstBytes> pieces) {
  std::array<unsigned char, kBlake2bHexDigits / 2> digest;
  const std::unique_ptr<EVP_MD, decltype(&EVP_MD_free)> algorithm(
      EVP_MD_fetch(nullptr, "BLAKE2B-512", nullptr), EVP_MD_free);
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(),
                                                                        EVP_MD_CTX_free);
  unsigned num_bytes = 0;
  const bool is_computed =
      algorithm != nullptr && context != nullptr &&
      EVP_DigestInit_ex2(context.get(), algorithm.get(), nullptr) == 1 &&
      std::ranges::all_of(pieces,
                          [&](ConstBytes piece) {
                            return EVP_DigestUpdate(context.get(), piece.data(), piece.size()) == 1;
                          }) &&
      EVP_DigestFinal_ex(context.get(), digest.data(), &num_bytes) == 1;
  if (!is_computed || num_bytes != digest.size()) {
    return Error(
        ErrorCode::kInternal,
        "OpenSSL could not compute BLAKE2b-512; check that its default provider is enabled");
  }
  return to_hex(std::as_bytes(std::span(digest)));
}

Result<std::string> blake2b_hex(ConstBytes bytes) {
  return blake2b_hex(std::span(&bytes, 1));
}

}  // namespace cadre::wire
