// A fast hash of bytes, by which ranks and runs find that their data differ; no protection against
// forgery.
//
// Threads: pure functions. Blocking: never. Errors: none.
// Source: XXH64 of the xxHash specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md): four
// independent lanes of 8 bytes, so that it reads about as fast as memory.
#pragma once

#include <cstdint>
#include <string_view>

#include "cadre/base/export.h"

namespace cadre {

CADRE_EXPORT uint64_t content_hash(std::string_view bytes);

}  // namespace cadre
