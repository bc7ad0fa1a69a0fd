// BLAKE2b-512, the digest that `b2sum` of coreutils prints.
//
// Threads: a pure function. Blocking: never. Errors: kInternal if the crypto library fails. Source:
// RFC 7693, computed by OpenSSL.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "cadre/core/base/error.h"
#include "cadre/core/base/export.h"
#include "cadre/core/base/types.h"

namespace cadre::wire {

inline constexpr size_t kBlake2bHexDigits = 128;

// Returns the digest in lower-case hexadecimal. Several pieces are digested as if they were
// concatenated.
CADRE_EXPORT Result<std::string> blake2b_hex(std::span<const ConstBytes> pieces);
CADRE_EXPORT Result<std::string> blake2b_hex(ConstBytes bytes);
// Calls `next` for one piece after the other until it returns an empty one, and returns the digest
// of all pieces. A piece must be valid until the next call. Returns an error of `next`.
CADRE_EXPORT Result<std::string> blake2b_hex(const std::function<Result<ConstBytes>()>& next);

}  // namespace cadre::wire
