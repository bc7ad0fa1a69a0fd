// BLAKE2b-512, the digest that `b2sum` of coreutils prints.
//
// Threads: a pure function. Blocking: never. Errors: kInternal when the crypto library fails.
// Source: RFC 7693, computed by OpenSSL.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre::wire {

inline constexpr size_t kBlake2bHexDigits = 128;

// In lower-case hexadecimal; of several pieces, one after the other.
CADRE_EXPORT Result<std::string> blake2b_hex(std::span<const ConstBytes> pieces);
CADRE_EXPORT Result<std::string> blake2b_hex(ConstBytes bytes);
// The digest of the pieces that `next` returns, up to an empty one. A piece is used before the next
// call. An error of `next` is returned.
CADRE_EXPORT Result<std::string> blake2b_hex(const std::function<Result<ConstBytes>()>& next);

}  // namespace cadre::wire
