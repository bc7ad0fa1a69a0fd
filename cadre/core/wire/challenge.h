// Proves that a side has the job's token without sending it: HMAC-SHA256 over both sides' nonces.
//
// Threads: pure functions. Blocking: never. Errors: kInternal when the crypto library fails.
// Source: RFC 2104, computed by OpenSSL.
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

// Returns the answer of the side called `prover` to the other side's nonce. It covers the prover's
// name and the prover's own nonce, so an answer can be neither reflected nor replayed.
CADRE_EXPORT Result<Digest> prove_token(std::string_view token, std::string_view prover,
                                        const Nonce& challenge, const Nonce& own);

// Takes a time that depends only on the sizes.
CADRE_EXPORT bool equals_in_constant_time(ConstBytes a, ConstBytes b);

}  // namespace cadre::wire
