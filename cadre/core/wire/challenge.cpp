#include "cadre/core/wire/challenge.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include "cadre/core/wire/byte_codec.h"

namespace cadre::wire {

Result<Digest> hmac_sha256(std::string_view key, ConstBytes message) {
  Digest digest;
  size_t num_bytes = 0;
  // A null key means "keep the last key" to OpenSSL.
  const char* key_data = key.empty() ? "" : key.data();
  const unsigned char* made =
      EVP_Q_mac(nullptr, "HMAC", nullptr, "SHA256", nullptr, key_data, key.size(),
                reinterpret_cast<const unsigned char*>(message.data()), message.size(),
                reinterpret_cast<unsigned char*>(digest.data()), digest.size(), &num_bytes);
  if (!made || num_bytes != digest.size()) {
    return Error(ErrorCode::kInternal,
                 "OpenSSL could not compute an HMAC-SHA256; check that its "
                 "default provider is enabled");
  }
  return digest;
}

Result<Digest> prove_token(std::string_view token, std::string_view prover, const Nonce& challenge,
                           const Nonce& own) {
  ByteWriter message;
  message.text(prover);
  message.raw(challenge);
  message.raw(own);
  return hmac_sha256(token, message.bytes());
}

bool equals_in_constant_time(ConstBytes a, ConstBytes b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace cadre::wire
