#include "cadre/core/wire/blake2b.h"

#include <openssl/evp.h>

#include <array>
#include <memory>
#include <span>

#include "cadre/core/wire/hex.h"

namespace cadre::wire {

namespace {

Error openssl_failure() {
  return Error(ErrorCode::kInternal,
               "OpenSSL could not compute BLAKE2b-512; check that its default provider is enabled");
}

}  // namespace

Result<std::string> blake2b_hex(const std::function<Result<ConstBytes>()>& next) {
  std::array<unsigned char, kBlake2bHexDigits / 2> digest;
  const std::unique_ptr<EVP_MD, decltype(&EVP_MD_free)> algorithm(
      EVP_MD_fetch(nullptr, "BLAKE2B-512", nullptr), EVP_MD_free);
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(),
                                                                        EVP_MD_CTX_free);
  if (algorithm == nullptr || context == nullptr ||
      EVP_DigestInit_ex2(context.get(), algorithm.get(), nullptr) != 1) {
    return openssl_failure();
  }
  while (true) {
    const Result<ConstBytes> piece = next();
    if (!piece.ok()) return piece.error();
    if (piece->empty()) break;
    if (EVP_DigestUpdate(context.get(), piece->data(), piece->size()) != 1) {
      return openssl_failure();
    }
  }
  unsigned num_bytes = 0;
  if (EVP_DigestFinal_ex(context.get(), digest.data(), &num_bytes) != 1 ||
      num_bytes != digest.size()) {
    return openssl_failure();
  }
  return to_hex(std::as_bytes(std::span(digest)));
}

Result<std::string> blake2b_hex(std::span<const ConstBytes> pieces) {
  return blake2b_hex([&pieces]() -> Result<ConstBytes> {
    while (!pieces.empty()) {
      const ConstBytes piece = pieces.front();
      pieces = pieces.subspan(1);
      if (!piece.empty()) return piece;
    }
    return ConstBytes();
  });
}

Result<std::string> blake2b_hex(ConstBytes bytes) {
  return blake2b_hex(std::span(&bytes, 1));
}

}  // namespace cadre::wire
