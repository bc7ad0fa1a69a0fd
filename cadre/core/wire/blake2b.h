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

// Returns the digest in lower-case hexadecimal. Several pieces are digested one after the other.
CADRE_EXPORT Result<std::string> blake2b_hex(std::span<const ConstBytes> pieces);
CADRE_EXPORT Result<std::string> blake2b_hex(ConstBytes bytes);
// Returns the digest of the pieces that `next` returns, until it returns an empty one. A piece is
// used only until the next call. An error of `next` is returned.
CADRE_EXPORT Result<std::string> blake2b_hex(const std::function<Result<ConstBytes>()>& next);

}  // namespace cadre::wire
