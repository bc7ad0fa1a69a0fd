// Proves that one end of a connection has the job's token without sending it, by an HMAC-SHA256
// over the nonces of both ends.
//
// Threads: pure functions. Blocking: never. Errors: kInternal if the crypto library fails. Source:
// RFC 2104, computed by OpenSSL.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre::wire {

inline constexpr size_t kNonceBytes = 32;
using Nonce = std::array<std::byte, kNonceBytes>;
using Digest = std::array<std::byte, 32>;

CADRE_EXPORT Result<Digest> hmac_sha256(std::string_view key, ConstBytes message);

// Returns the proof of the end called `prover`. `challenge` is the nonce of the other end, `own`
// that of the prover. The proof covers both nonces and the prover's name, so it can be neither
// replayed nor reflected.
CADRE_EXPORT Result<Digest> prove_token(std::string_view token, std::string_view prover,
                                        const Nonce& challenge, const Nonce& own);

// Compares in a time that depends only on the sizes, so that timing reveals no byte.
CADRE_EXPORT bool equals_in_constant_time(ConstBytes a, ConstBytes b);

}  // namespace cadre::wire
