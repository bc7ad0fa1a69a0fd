// BLAKE2b-512, the digest that `b2sum` of coreutils prints.
//
// Threads: a pure function. Blocking: never. Errors: kInternal when the crypto library fails.
// Source: RFC 7693, computed by OpenSSL.
#pragma once

#include <span>
#include <string>

#include "cadre/base/error.h"
#include "cadre/base/export.h"
#include "cadre/base/types.h"

namespace cadre::wire {

inline constexpr size_t kBlake2bHexDigits = 128;

// In lower-case hexadecimal; of several pieces, one after the other.
CADRE_EXPORT Result<std::string> blake2b_hex(std::span<const ConstBytes> pieces);
CADRE_EXPORT Result<std::string> blake2b_hex(ConstBytes bytes);

}  // namespace cadre::wire
